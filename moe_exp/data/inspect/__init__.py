"""What is in token and JSONL files, and whether it is what their manifest says."""
