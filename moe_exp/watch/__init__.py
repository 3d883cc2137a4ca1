"""Monitoring of long-running jobs. No torch."""
