"""What the processes that tests fork have imported: all that a launcher and a rank import, see ranks.py."""

import ctypes
import gc
import re
import sys
from importlib import import_module
from pathlib import Path

from helpers.layers import interpreter
from moe_exp.cli import COMMANDS
from moe_exp.runs.run_folder import package_versions

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
    "moe_exp.runs.summary",
    "moe_exp.training.loop",
    "pytest",
    "tensorboard.plugins.hparams.metadata",
    "torch._dynamo",
    "torch.distributed",
    "torch.utils.tensorboard",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.olmoe.modeling_olmoe",
    "triton.experimental.gluon",
    *(f"moe_exp.commands.{name}" for name in dict.fromkeys(COMMANDS.values())),
):
    import_module(name)

interpreter.speed_up()
package_versions()
gc.collect()
gc.freeze()  # the forks need not look at these objects again
gc.enable()


def use_huge_pages() -> None:
    """A fork copies a table of all pages, of 2 MB (Linux 6.1 and newer) in a third of the time."""
    size, collapse = 1 << 21, 25  # MADV_COLLAPSE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    own = r"^(\w+)-(\w+) rw-p \w+ 00:00 0 *(?:\[heap\])?$"
    for start, end in re.findall(own, Path("/proc/self/maps").read_text(), flags=re.MULTILINE):
        for address in range(-int(start, 16) // size * -size, int(end, 16) - size + 1, size):
            madvise(address, size, collapse)  # an older kernel does nothing


if sys.platform == "linux":
    use_huge_pages()
