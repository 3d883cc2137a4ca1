"""What tests share; tests find it as `helpers`, since tests/ is on their path (pyproject.toml).

Starting things:
    ranks.py              a function, or a script for torchrun, on several gloo ranks of this machine
    preloaded.py          what the processes that ranks.py forks have imported
    whole_runs.py         whole runs with settings from the environment, by the script or by warm_runs.py
    warm_runs.py          a launcher and its ranks without the script, torchrun's agent and the imports
    studies/study_runs.py a sweep, comparison or ladder: as processes, or in a fork
    under_torchrun.py     tests that are torchrun scripts as well
    net_hosts.py          hosts in network namespaces of this machine; needs root and iproute2
    slurm/stand_in.py     a SLURM for chains of jobs: sbatch, squeue, srun, scancel and scontrol as programs
    slurm/cluster.py      a SLURM whose queue a test controls
    servers/              a Hugging Face hub and an S3 store on 127.0.0.1 that fail as they are told to
    watch/smtp_sink.py    a mail server that keeps what it is sent
    chromium.py           a headless browser

Models, data and run folders:
    model_on_ranks.py     trains whole models on a layout: losses, gradients, norms
    layers/mesh_model.py  a torch-native MoE language model around our layer
    planner/              planned (models, devices, constants), built_ranks (any rank of a world of any size,
                          on torch's meta device)
    jsonl.py              files of JSONL
    token_files.py        whose tokens all differ; on which the loss spikes
    run_folders.py        run folders as a trainer leaves them
    watch/watched_run.py  a run folder and a squeue as the watchdog sees them
    checkpoint/           ckpt_files (without ranks), small_job (inside ranks), legs (training in legs),
                          file_limit (a disk that is full for this process)
    hf/                   tiny_models of transformers, hf_checkpoint (their weights here), logits_on_ranks
    layers/               tiny_moe, references (formulas and loops to compare with), layout_job,
                          megatron_pair, attention_pair; for kernels: backward_cases, compiled, ceilings,
                          kernel_launches, kernel_device

Documentation:
    docs/                 commands (of the Markdown pages, parsed), links (which lead nowhere)

Measures:
    answered.py           a command line in this process under a time limit; junk in the place of a file
    relative_error.py     norm of the difference over norm of the reference, in float64
"""

import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def wait_for(is_so: Callable[[], object], *, timeout: float = 120.0, said: Callable[[], str] = str) -> None:
    """Returns once `is_so` is true; fails after `timeout` seconds, with what `said` returns then."""
    deadline = time.monotonic() + timeout
    while not is_so():
        assert time.monotonic() < deadline, f"it has not come to that in {timeout} s: {said()}"
        time.sleep(0.05)
