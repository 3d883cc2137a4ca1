"""Datasets of the hub, and where documents come from."""
