"""Preflight: checks all nodes of a job before training, in under a minute. node.py lists the steps."""
