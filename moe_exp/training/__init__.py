"""Training loop of a rank, with metrics, checkpoints and guards."""
