"""Corpus -> tokens -> batches. Stages pass data on as files. Of the folders, only `samples` imports torch."""
