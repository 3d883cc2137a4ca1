"""Variants trained at several sizes, their scaling laws, and what a variant saves."""
