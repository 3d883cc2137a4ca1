"""Checkpoints: Megatron's distributed format (`torch_dist`) with Megatron's sharded keys. Files here are
called by every rank.

state.py           everything that is saved: weights, optimizer, schedule, random streams, progress
optimizer_state.py the optimizer's state as shards of whole tensors, one form under every optimizer
save.py            saves: which rank writes which piece, and how a checkpoint is published
integrity.py       which checkpoints are whole, and which one training continues from
load.py            loads under whatever layout, and compares what was loaded with what was saved
remote.py          the copy of a run at an object store
upcycle.py         a dense run's weights as the start of an MoE run
format/            the files themselves, on one process; no collectives
tools/             `moe-exp ckpt`
hf/                Hugging Face folders, both ways
"""
