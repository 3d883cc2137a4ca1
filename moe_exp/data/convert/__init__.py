"""Converts downloaded files to JSONL chunks with datatrove."""
