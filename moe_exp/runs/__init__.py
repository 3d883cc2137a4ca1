"""Output of a run: its folder, its records, its summary."""
