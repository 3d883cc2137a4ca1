"""Launching a run: checks, SLURM jobs, preflight, and the ranks of each node."""
