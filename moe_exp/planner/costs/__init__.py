"""Parameter counts, memory, FLOPs and time of a job. Does not import torch."""
