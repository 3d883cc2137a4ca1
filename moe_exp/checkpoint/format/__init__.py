"""The files of a checkpoint and what is in them, on one process."""
