"""Builds Megatron's model and optimizer on this rank from a Config."""
