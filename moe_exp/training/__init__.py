"""What surrounds the training loop inside a rank: metrics, checkpoints, guards."""
