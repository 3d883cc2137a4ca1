"""Variants trained at several sizes, their scaling laws and effective speedups."""
