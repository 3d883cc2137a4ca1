"""Checkpoints in Megatron's distributed format (`torch_dist`) with Megatron's sharded keys. Every rank calls
the files here. `format/` handles the files on one process, `tools/` is `moe-exp ckpt`, `hf/` converts.
"""
