"""Runs of weeks: what is looked at while nobody looks. No torch."""
