"""Reports on runs: they read run folders and import nothing from training."""
