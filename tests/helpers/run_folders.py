"""Run folders with the files that a trainer leaves: config.yaml and metrics.jsonl."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.whole_runs import SMALL
from moe_exp.config import Config, to_yaml

TOKENS, SAMPLES = 512, 8  # of an iteration


def train_record(iteration: int, lm_loss: float | None, **more: Any) -> dict[str, Any]:
    """A train record of a dense run."""
    return {
        "kind": "train", "iteration": iteration, "consumed_samples": SAMPLES * iteration,
        "consumed_tokens": TOKENS * iteration, "global_batch_size": SAMPLES, "lm_loss": lm_loss,
        "load_balancing_loss": None, "z_loss": None, "aux_losses": {}, "learning_rate": 1e-3,
        "grad_norm": 1.0, "elapsed_time_per_iteration_ms": 100.0, "tokens_per_second": 5120.0,
        "tflops_per_gpu": 0.5, "memory_allocated_bytes": None, "peak_memory_bytes": 4_000_000_000,
        "experts": [], "consumed_flops": 1000 * iteration, "training_seconds": 0.1 * iteration,
    } | more  # fmt: skip


def experts(*layers: Sequence[int]) -> list[dict[str, Any]]:
    """The `experts` of a record, as older versions wrote them: no dead_fraction and no top1_weight."""
    return [
        {
            "layer": number, "tokens_per_expert": list(counts), "dropped_fraction": 0.0,
            "max_over_mean": max(counts) * len(counts) / sum(counts), "router_entropy": math.log(len(counts)),
        }
        for number, counts in enumerate(layers, start=1)
    ]  # fmt: skip


def event(name: str, iteration: int, time: str, **more: Any) -> dict[str, Any]:
    """An event record."""
    head = {"kind": "event", "event": name, "iteration": iteration}
    return {**head, "time": f"2026-01-02T{time}+00:00", **more}


def write_run(path: Path, records: Sequence[Mapping[str, Any]], **settings: Any) -> Path:
    """Makes the run folder `path` and returns it."""
    path.mkdir(parents=True)
    sizes = {"num_layers": 2, "num_experts": 4, "seq_len": 64, "gbsz": SAMPLES}
    config = Config(**(SMALL | sizes | settings))
    (path / "config.yaml").write_text(to_yaml(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def dense_and_moe(folder: Path) -> tuple[Path, Path]:
    """Two runs of 40 iterations: the one with experts is better, takes longer, and loses an expert."""
    dense, moe = [event("start", 0, "10:00:00")], [event("start", 0, "10:00:00")]
    for index in range(1, 41):
        norm = 9.0 if index == 30 else 1.0
        loads = ([120, 8, 64, 64], [64 * index, 64 * index, 64 * index, 0 if index > 20 else 64 * index])
        dense.append(train_record(index, 8 - 0.1 * index))
        loss = None if index in (11, 12) else 8 - 0.125 * index
        more = {"experts": experts(*loads), "load_balancing_loss": 1.1, "grad_norm": norm}
        more |= {"consumed_flops": 1500 * index, "training_seconds": 0.3 * index}
        moe.append(train_record(index, loss, **more))
        for records in (dense, moe):
            if index % 10 == 0:
                loss = records[-1]["lm_loss"] + 0.05
                losses = {"lm_loss": loss, "lm_loss_ppl": math.exp(loss)}
                records.append({"kind": "valid", "iteration": index, **losses})
    moe.append(event("checkpoint_failed", 20, "10:00:30", reason="no space left"))
    moe.append(event("resume", 20, "10:01:00"))
    for records in (dense, moe):
        records.append(event("end", 40, "10:02:00", status="finished"))
    experts_run = write_run(folder / "experts", moe, use_moe=True, topk=2)
    return write_run(folder / "dense", dense, use_moe=False), experts_run
