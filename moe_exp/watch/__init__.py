"""Monitoring of long-running jobs, without torch."""
