"""Comparison of models trained sequentially with the same budget."""
