"""What the processes that tests fork have imported: all that a launcher and a rank import, see ranks.py."""

import gc
from importlib import import_module

from helpers.layers import interpreter
from moe_exp.cli import COMMANDS
from moe_exp.runs.provenance import package_versions

gc.disable()  # as in moe_exp.train: the imports make no garbage
for name in (
    "datatrove.executor",
    "hypothesis",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "moe_exp.data.convert.steps",
    "moe_exp.launch.launch",
    "moe_exp.layers.megatron.attention",
    "moe_exp.layers.moe_layer",
    "moe_exp.runs.finish",
    "moe_exp.train",
    "pytest",
    "tensorboard.plugins.hparams.metadata",
    "torch._dynamo",
    "torch.distributed",
    "torch.utils.tensorboard",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.olmoe.modeling_olmoe",
    "triton.experimental.gluon",
    *(f"moe_exp.commands.{name}" for name in COMMANDS),
):
    import_module(name)

interpreter.speed_up()
package_versions()
gc.collect()
gc.freeze()  # the forks need not look at these objects again
gc.enable()
