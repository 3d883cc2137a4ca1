"""Entry point of a rank: `torchrun --nproc-per-node 2 -m moe_exp.train` runs `main` of training/loop.py."""

import gc
import json
import os

from moe_exp.host.exit_codes import STANDS_BY
from moe_exp.host.processes import QuickExit


def stand_by() -> None:
    """Waits for the environment of the rank that this process becomes, see `launch.agent.StandBys`."""
    # the first optimizer and the first log would import these
    import torch._dynamo
    import torch.utils.tensorboard  # noqa: F401

    with os.fdopen(int(os.environ[STANDS_BY]), "rb") as file:
        environ = file.read()
    if not environ:  # the agent has ended
        os._exit(0)
    os.environ.clear()
    os.environ.update(json.loads(environ))


if __name__ == "__main__":
    gc.disable()  # imports create no garbage, and collecting takes half a second
    ending = QuickExit()
    from moe_exp.training.loop import main

    if STANDS_BY in os.environ:
        stand_by()
    gc.enable()
    ending.code = main()
