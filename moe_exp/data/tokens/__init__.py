"""Tokenization of documents into Megatron's .bin/.idx token files."""
