"""Corpus -> tokens -> batches, in stages that exchange files. Only the folder `samples` imports torch."""
