"""Token files to training samples; the only part of `data` with torch."""
