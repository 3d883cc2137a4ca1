"""Checkpoints in Megatron's distributed format (`torch_dist`) with Megatron's sharded keys. All ranks call
the modules here. `format/` works on files in one process, `tools/` implements `moe-exp ckpt`, `hf/` converts.
"""
