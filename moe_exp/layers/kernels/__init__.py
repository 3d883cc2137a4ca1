"""Triton kernels of the MoE layer, each with a plain-torch reference."""
