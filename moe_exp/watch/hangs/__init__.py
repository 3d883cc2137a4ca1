"""Hang detection: heartbeats, stacks, and the ranks that hold the others up."""
