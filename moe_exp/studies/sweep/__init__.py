"""Measures many layouts in short runs, for `moe-exp sweep`."""
