"""Checks each node of a job in under a minute before training; node.py has the steps."""
