"""Downloaded files to JSONL chunks, by datatrove."""
