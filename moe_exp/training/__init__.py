"""Parts around the training loop inside a rank: metrics, checkpoints, guards."""
