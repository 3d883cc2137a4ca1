"""Hugging Face folders <-> checkpoints of this package."""
