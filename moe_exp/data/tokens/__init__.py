"""Documents to Megatron's .bin/.idx token files."""
