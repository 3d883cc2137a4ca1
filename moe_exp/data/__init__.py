"""Corpus -> tokens -> batches. Stages hand over files; of all folders only `samples` imports torch."""
