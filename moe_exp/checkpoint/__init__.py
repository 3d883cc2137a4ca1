"""Checkpoints: Megatron's distributed format (`torch_dist`) with Megatron's sharded keys.

Where they lie, without torch:

    folders.py         names, manifest, how one is published and removed
    retention.py       which of them are kept
    boxes.py           ranges of a tensor's values as boxes

A run, called by every rank:

    state.py           everything that is saved: weights, optimizer, schedule, random streams, progress
    keys.py            Megatron's names of the tensors of a model, and the model's state under them
    optimizer_state.py the optimizer's state as shards of whole tensors, one form under every optimizer
    plan.py            which rank writes which piece
    rank_files.py      writes the pieces of a rank
    save.py            saves
    integrity.py       which of them are whole, and which one training goes on from
    load.py            loads under whatever layout
    sharded_load.py    Megatron's reading, in which nothing of a file is run
    agreement.py       what rank 0 finds out, on every rank

The files themselves, on one process:

    torch_dist.py      reads them piece by piece
    torch_dist_writer.py writes them so
    foreign.py         the settings that Megatron-LM writes
    settings.py        the settings of the run that wrote one
    naming.py          tensors by layer and expert, whatever the style
    layouts.py         the pieces that each rank of a layout asks for
    info.py soundness.py diff.py reshape.py pruning.py shrink.py tables.py     the work of `moe-exp ckpt`
"""
