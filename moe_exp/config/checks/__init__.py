"""What has to hold between settings, before a run starts. No torch."""
