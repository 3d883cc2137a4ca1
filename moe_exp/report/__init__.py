"""Reports on runs: reads run folders and imports nothing from training."""
