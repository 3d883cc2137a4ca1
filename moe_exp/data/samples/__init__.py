"""Training samples from token files; the only part of `data` that imports torch."""
