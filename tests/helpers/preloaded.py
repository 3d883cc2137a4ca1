"""What the processes that tests fork have imported: all that a launcher and a rank import, see ranks.py."""

import gc
from importlib import import_module

for name in (
    "hypothesis",
    "matplotlib.backends.backend_agg",
    "moe_exp.cli",
    "moe_exp.commands.train",
    "moe_exp.layers.megatron.attention",
    "moe_exp.layers.moe_layer",
    "moe_exp.runs.finish",
    "moe_exp.train",
    "pytest",
    "torch.distributed",
):
    import_module(name)

gc.collect()
gc.freeze()  # the forks need not look at these objects again
