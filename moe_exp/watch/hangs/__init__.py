"""Ranks that stand still: heartbeats, stacks, and who is not where the others are."""
