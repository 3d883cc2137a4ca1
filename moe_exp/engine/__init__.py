"""From a Config to Megatron's model and optimizer on this rank."""
