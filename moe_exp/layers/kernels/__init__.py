"""Triton kernels of the MoE layer, each beside its plain-torch twin."""
