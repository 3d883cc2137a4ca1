"""Entry point of a rank: `torchrun --nproc-per-node 2 -m moe_exp.train` runs `main` of training/loop.py."""

import gc

from moe_exp.host.processes import QuickExit

if __name__ == "__main__":
    gc.disable()  # imports create no garbage, and collecting takes half a second
    ending = QuickExit()
    from moe_exp.training.loop import main

    gc.enable()
    ending.code = main()
