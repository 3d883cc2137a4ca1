"""JSONL files in random order, and merged."""
