"""What a configuration costs, computed from its settings alone: parameters, bytes, FLOPs. No torch."""
