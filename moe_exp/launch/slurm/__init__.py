"""Submits a training run as consecutive SLURM jobs. Imports no torch."""
