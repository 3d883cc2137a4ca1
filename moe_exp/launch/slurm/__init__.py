"""Submits a training run, from its settings, as consecutive SLURM jobs. Imports no torch."""
