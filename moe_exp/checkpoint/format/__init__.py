"""The files of a checkpoint and what is in them, on one process.

folders.py           where checkpoints lie: names, manifest, how one is published and removed; no torch
boxes.py             ranges of a tensor's values as boxes
keys.py              Megatron's names of the tensors of a model, and the model's state under them
naming.py            tensors by layer and expert, whatever the style
torch_dist.py        reads the files piece by piece
torch_dist_writer.py writes them so
sharded_load.py      Megatron's reading, in which nothing of a file is run
fingerprints.py      64 bits for each tensor, whatever the layout
settings.py          the settings of the run that wrote one
"""
