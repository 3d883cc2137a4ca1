"""Predicts the cost of a configuration from its settings: parameters, memory, FLOPs and time. No torch."""
