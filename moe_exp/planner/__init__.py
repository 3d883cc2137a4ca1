"""Costs of a configuration, computed from its settings alone: parameters, bytes, FLOPs. No torch."""
