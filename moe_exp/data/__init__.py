"""Corpus -> tokens -> batches. Stages exchange data as files. Only the folder `samples` imports torch."""
