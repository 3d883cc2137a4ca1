"""Training samples from token files; the only folder of `data` that imports torch."""
