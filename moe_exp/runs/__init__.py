"""What a run leaves behind: its folder, its records, its summary."""
