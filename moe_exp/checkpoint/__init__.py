"""Checkpoints in Megatron's distributed format (`torch_dist`) with Megatron's sharded keys. All ranks call
these modules. Subfolders: `format/` (files and keys), `tools/` (`moe-exp ckpt`), `hf/` (Hugging Face).
"""
