"""Preflight: checks all nodes of a job in under a minute before training; node.py lists the steps."""
