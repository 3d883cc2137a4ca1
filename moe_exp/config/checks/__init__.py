"""Constraints between settings, checked before a run starts. No torch."""
