"""Runs the tasks of a datatrove pipeline: on this machine, as SLURM jobs, or on a Ray cluster."""
