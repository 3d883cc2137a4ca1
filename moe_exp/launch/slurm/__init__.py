"""A training run as consecutive SLURM jobs: from settings to sbatch. No torch."""
