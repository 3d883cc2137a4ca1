"""Predicts parameters, memory, FLOPs and time of a configuration from its settings, without torch."""
