"""Corpus -> tokens -> batches. The stages hand over files (.bin/.idx, tokenizer.json); only `dataset` imports torch."""
