"""From settings to running ranks."""
