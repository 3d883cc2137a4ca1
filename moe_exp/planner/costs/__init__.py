"""Parameters, bytes, FLOPs and seconds of a job. No torch."""
