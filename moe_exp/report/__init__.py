"""Creates reports from run folders. Imports nothing from training."""
