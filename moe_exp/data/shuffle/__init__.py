"""Shuffling and merging of JSONL files."""
