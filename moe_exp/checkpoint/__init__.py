"""Checkpoints: Megatron's distributed format (`torch_dist`) with Megatron's sharded keys.

folders.py       where they lie, their manifest, how one is published and removed; no torch
retention.py     which of them are kept; no torch
torch_dist.py    reads and writes the format's files piece by piece, without ranks
integrity.py     which of them are whole, and which one training goes on from
keys.py          Megatron's names of the tensors of a model, and the model's state under them
boxes.py         ranges of a tensor's values as boxes; no torch
optimizer_state.py  the optimizer's state as shards of whole tensors, one form under every optimizer
model_changes.py  settings that a checkpoint does not go on with; no torch
state.py         everything that is saved: weights, optimizer, schedule, random streams, progress
plan.py          which rank writes which piece
rank_files.py    writes the pieces of a rank
save.py          saves; called by every rank
load.py          loads under whatever layout; called by every rank
sharded_load.py  Megatron's reading, in which nothing of a file is run
settings.py      the settings of the run that wrote one
agreement.py     what rank 0 finds out, on every rank
"""
