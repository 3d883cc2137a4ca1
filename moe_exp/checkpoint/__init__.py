"""Checkpoints: Megatron's distributed format (`torch_dist`) with Megatron's sharded keys. Files here are
called by every rank.

state.py           everything that is saved: weights, optimizer, schedule, random streams, progress
optimizer_state.py the optimizer's state as shards of whole tensors, one form under every optimizer
plan.py            which rank writes which piece
save.py            saves
retention.py       which checkpoints of a run are kept
integrity.py       which of them are whole, and which one training continues from
load.py            loads under whatever layout
restored.py        whether what was loaded is what was saved
remote.py          the copy of a run at an object store; uploads.py makes it during training
upcycle.py         a dense run's weights as the start of an MoE run
format/            the files themselves, on one process; no collectives
tools/             `moe-exp ckpt`
hf/                Hugging Face folders, both ways
"""
