"""For tests that are torchrun scripts as well: how they start, and how pytest starts them.

Importing this module puts the checkout on the path, so that `torchrun tests/test_dmoe.py` finds moe_exp where
it is not installed.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


@contextmanager
def torchrun_job() -> Iterator[torch.device]:
    """Joins the job: NCCL where every rank of this node has a GPU, else gloo. Yields the device."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """Ends the process without the interpreter's clean-up.

    With FSDP2 over gloo (torch 2.13) that ends now and then, about once in fifteen runs, in "terminate called
    without an active exception", after all is done and the process group is destroyed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def on_first_rank(text: str) -> None:
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def torchrun(num_ranks: int, script: str, **environment: object) -> subprocess.CompletedProcess[str]:
    """Runs a script under torchrun, with variables on top of those of this process."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *launcher, script]
    given = {name: str(value) for name, value in environment.items()}
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **given}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
