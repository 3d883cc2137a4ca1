"""Converts between Hugging Face folders and this package's checkpoints."""
