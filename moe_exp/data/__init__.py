"""Corpus -> tokens -> batches. Stages hand over files; only `dataset`, `megatron_dataset` and `prefetch`
import torch.
"""
