"""Hang detection: heartbeats, stacks, and the ranks that are not where the others are."""
