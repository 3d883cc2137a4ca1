"""Describes token and JSONL files, and compares them with their manifest."""
