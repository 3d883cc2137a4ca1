"""Parameter counts, memory, FLOPs and time of a job. No torch."""
