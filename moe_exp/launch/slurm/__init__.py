"""A training run as SLURM jobs, one after another: from settings to sbatch. No torch."""
