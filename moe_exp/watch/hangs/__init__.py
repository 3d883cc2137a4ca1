"""Hang detection: heartbeats, stacks, and the ranks that block other ranks."""
