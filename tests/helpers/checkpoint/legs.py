"""Training in legs: a leg starts at iteration 0 or from a checkpoint, on whatever layout, and may save.

`run_legs` trains them with the own step of `training/loop.py`: those of equally many ranks in the same
processes, one after the other, each with model and optimizer of its own.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helpers.checkpoint.saving import save
from helpers.jsonl import BinIdxWriter
from helpers.ranks import free_port, in_turn, run_on_ranks
from helpers.whole_runs import SMALL
from moe_exp.checkpoint.load import load
from moe_exp.checkpoint.state import Progress, Trained
from moe_exp.config import Config, load_config
from moe_exp.engine import runtime
from moe_exp.engine.model import build_model
from moe_exp.engine.optimizer_setup import LearningRateScheduler, build_optimizer
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training import loop
from moe_exp.training.interval import Interval
from moe_exp.training.samples import build_data

VOCAB = 128
# Every size differs from the others, so that no two axes can be mixed up unseen. The learning rate moves at
# every step.
MODEL: dict[str, Any] = {
    **SMALL, "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 24,
    "num_heads": 4, "num_query_groups": 2, "seq_len": 16, "vocab_size": VOCAB, "num_experts": 8, "topk": 2,
    "mbsz": 2, "gbsz": 8, "train_iters": 20, "warmup_iters": 10, "decay_iters": 20, "lr": 1e-3,
    "aux_loss_coeff": 0.01, "z_loss_coeff": 1e-3, "eval_interval": 0, "dtype": "fp32", "num_workers": 0,
}  # fmt: skip


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"gpus_per_node": 1},
    "DP2": {"gpus_per_node": 2},
    "TP2": {"gpus_per_node": 2, "tp": 2},
    "PP2": {"gpus_per_node": 2, "pp": 2},
    "EP2": {"gpus_per_node": 2, "ep": 2},
    "TP2_ETP2": {"gpus_per_node": 2, "tp": 2, "etp": 2},
    "PP2_VPP2": {"gpus_per_node": 2, "pp": 2, "vpp": 2},
    "EP4": {"gpus_per_node": 4, "ep": 4},
    "PP2_EP2": {"gpus_per_node": 4, "pp": 2, "ep": 2},
    "TP2_EP2_ETP2": {"gpus_per_node": 4, "tp": 2, "ep": 2, "etp": 2},
    "TP2_PP2_ETP2": {"gpus_per_node": 4, "tp": 2, "pp": 2, "etp": 2},
}
LAYOUTS |= {f"{name} whole": layout | {"distributed_optimizer": False} for name, layout in LAYOUTS.items()}


class Step(NamedTuple):
    """What an iteration shows."""

    lm_loss: float
    balancing_loss: float | None
    z_loss: float | None
    grad_norm: float
    params_norm: float
    learning_rate: float
    tokens_per_expert: list[list[int]]


@dataclass(frozen=True)
class Leg:
    settings: Mapping[str, Any] = field(default_factory=dict)  # on top of MODEL and the data
    start: Path | None = None  # checkpoints folder to continue from, or iteration 0
    steps: int = 20
    # iteration to the checkpoints folder that is written after it, that of the start included
    saves: Mapping[int, Path] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return load_config(MODEL | dict(self.settings), {})


def write_data(folder: Path) -> Path:
    """Token files with something to learn in them; returns their prefix."""
    generator = np.random.default_rng(0)
    with BinIdxWriter(folder / "tokens", vocab_size=VOCAB) as writer:
        for _ in range(60):
            first, step = generator.integers(1, VOCAB), generator.integers(1, 5)
            writer.add_document(1 + (first + step * np.arange(generator.integers(30, 90))) % (VOCAB - 1))
    return folder / "tokens"


def run_legs(legs: Sequence[Leg], *, timeout: float = 300.0) -> list[list[Step]]:
    """Runs legs, by numbers of ranks in the order of the first of each, else in theirs; the steps of each."""
    found: dict[int, list[Step]] = {}
    sizes = [leg.config.world_size for leg in legs]
    for num_ranks in dict.fromkeys(sizes):
        places = [place for place, size in enumerate(sizes) if size == num_ranks]
        jobs = [(legs[place], free_port()) for place in places]
        done = run_on_ranks(num_ranks, run_on_rank, jobs, join=False, timeout=timeout)[0]
        found |= dict(zip(places, done, strict=True))
    return [found[place] for place in range(len(legs))]


def run_on_rank(jobs: Sequence[tuple[Leg, int]]) -> list[list[Step]]:
    """Every leg on this rank."""
    return in_turn(_run, jobs)


def _run(leg: Leg, port: int) -> list[Step]:
    job = start_job(leg.settings, port)
    config, rank = job.config, job.runtime
    progress = load(config, rank, leg.start, job.trained) if leg.start else Progress()
    interval, steps = Interval(config, rank, job.trained.model), []
    for step in range(leg.steps + 1):
        if step:
            grad_norm = loop.train_step(job, progress, interval, count_zeros=False).grad_norm
            steps.append(_step(job, progress, interval, grad_norm))
        if progress.iteration in leg.saves:
            save(config, rank, leg.saves[progress.iteration], job.trained, progress)
    runtime.stop()
    return steps


def start_job(settings: Mapping[str, Any], port: int) -> Any:
    """On a rank: the job of a leg with these settings."""
    os.environ["MASTER_PORT"] = str(port)
    config = Leg(settings).config
    return build_job(config, runtime.start(config))


def build_job(config: Config, rank: Any) -> Any:
    """What `loop.build` builds, without a run folder."""
    model = build_model(config, rank)
    optimizer = build_optimizer(config, model)
    trained = Trained(model, optimizer, LearningRateScheduler(config, optimizer))
    loop.optimizer_setup.set_megatron_hooks(model, trained.optimizer)
    samples, _ = build_data(config)
    return loop.Job(config, rank, RunFolder(Path(config.run_dir)), trained, samples, None)


def _step(job: Any, progress: Any, interval: Any, grad_norm: float) -> Step:
    facts = {"learning_rate": job.trained.scheduler.get_lr({}), "grad_norm": grad_norm}
    record = interval.record(progress, **facts, num_zeros=None, loss_scale=1.0)
    names = ("lm_loss", "load_balancing_loss", "z_loss", "grad_norm", "params_norm", "learning_rate")
    tokens = [layer["tokens_per_expert"] for layer in record["experts"]]
    return Step(*(record[name] for name in names), tokens)


def deviations(steps: Sequence[Step], expected: Sequence[Step]) -> dict[str, float]:
    """Largest relative deviation over the steps of every value that is a number."""
    assert len(steps) == len(expected) > 0
    found = {}
    for name in Step._fields[:6]:
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(steps, expected, strict=True)]
        if pairs[0][1] is not None:
            found[name] = max(abs(value - right) / abs(right) for value, right in pairs)
    return found
