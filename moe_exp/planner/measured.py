"""Measured runs from a CSV: what each ran as a `Job`, and what was measured. No torch.

Columns as in `profiles/measured_runs.csv`; those of results (mem_gb, oom, sec_per_it) and of trust (use_mem, use_time, quirk) may be
absent or empty. Memory is in GiB, time in seconds per iteration.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_exp.config import Config
from moe_exp.planner.hardware import Hardware, load_hardware
from moe_exp.planner.job import Job
from moe_exp.planner.stages import split_layers

GIBIBYTE = 2**30
MEASURED_RUNS = Path(__file__).parent / "profiles" / "measured_runs.csv"
# What a prediction cannot do without. Column to whether 0 is a size, too.
_SIZES = {"layers": False, "hidden": False, "heads": False, "seq": False, "vocab": False, "tp": False, "pp": False}
_REQUIRED = ("row_id", "gpu", *_SIZES)
_OTHER_NUMBERS = {
    "gpus_per_node": False, "nodes": False, "n_gpus": False, "ffn": False, "kv_groups": False, "dp": False, "mbs": False, "gbs": False,
    "swiglu": True, "experts": True, "topk": True, "ep": True, "pp_balanced_embedding": True, "mem_gb": True, "sec_per_it": True,
}  # fmt: skip
_FLAGS = ("oom", "use_mem", "use_time", "quirk")
_WORDS = {
    "precision": ("fp32", "fp16", "bf16", "bf16_fp32grad"),
    "zero_stage": ("0", "1", "1(dist-opt)"),
    "recompute": ("none", "selective", "full"),
}


@dataclass(frozen=True)
class MeasuredRun:
    """One row.

    Attributes:
        row_id: its name.
        section: of the source that it stands in; rows of one were measured together.
        job: what ran.
        hardware: on what.
        memory_gib: measured memory of a GPU, None where there is none or it cannot be trusted.
        seconds: measured seconds per iteration, or None likewise.
        oom: whether it ran out of memory; None where nothing says.
    """

    row_id: str
    section: str
    job: Job
    hardware: Hardware
    memory_gib: float | None
    seconds: float | None
    oom: bool | None


def read_runs(path: Path) -> list[MeasuredRun]:
    """All rows of a CSV.

    Raises:
        ValueError: with a line for every cell that is missing or is no such number, by row and column.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        rows = list(reader)
    if absent := [name for name in _REQUIRED if name not in columns]:
        raise ValueError(f"{path}: has no column {', '.join(absent)}. Fix: name the columns as {MEASURED_RUNS.name} of the package does.")
    if not rows:
        raise ValueError(f"{path}: has no rows. Fix: give one line per run after the names of the columns.")
    problems = [line for number, row in enumerate(rows, start=2) for line in _problems(row, f"{path}, row {row['row_id'] or number}")]
    problems += _repeated(rows, path)
    if problems:
        raise ValueError("\n".join(problems))
    return [_run(row) for row in rows]


def _repeated(rows: list[dict[str, str]], path: Path) -> Iterator[str]:
    seen: set[str] = set()
    for row in rows:
        if row["row_id"] in seen:
            yield f"{path}, row {row['row_id']}, column row_id: stands there twice. Fix: give every row its own name."
        seen.add(row["row_id"])


def _problems(row: Mapping[str, Any], where: str) -> Iterator[str]:
    """Lines on all cells of a row that cannot be read."""
    for name in _REQUIRED:
        if not row.get(name):
            yield f"{where}, column {name}: is empty. Fix: give its value."
    for name, zero in (_SIZES | _OTHER_NUMBERS).items():
        if row.get(name) and not _is_number(row[name], zero, whole=name not in ("mem_gb", "sec_per_it")):
            rule = "0 or more" if zero else "more than 0"
            yield f"{where}, column {name}={row[name]}: must be a number, {rule}. Fix: mend the cell, or leave it empty if it may be."
    for name in _FLAGS:
        if row.get(name) not in (None, "", "0", "1"):
            yield f"{where}, column {name}={row[name]}: must be 0 or 1. Fix: mend the cell."
    for name, words in _WORDS.items():
        if row.get(name) and row[name] not in words:
            yield f"{where}, column {name}={row[name]}: is not known. Fix: use one of {', '.join(words)}."
    if row.get("gpu"):
        try:
            load_hardware(row["gpu"])
        except ValueError as error:
            yield f"{where}, column gpu: {error}"


def _is_number(text: str, zero: bool, *, whole: bool) -> bool:
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        return False
    return 0 < number < float("inf") or (zero and number == 0)


def _run(row: Mapping[str, str]) -> MeasuredRun:
    trusted = row.get("quirk") in (None, "", "0")

    def measured(name: str, flag: str) -> float | None:
        is_trusted = trusted and row.get(flag) in (None, "", "1")
        return float(row[name]) if row.get(name) and is_trusted and float(row[name]) else None

    return MeasuredRun(
        row_id=row["row_id"],
        section=row.get("section") or "",
        job=job_of_row(row),
        hardware=load_hardware(row["gpu"]),
        memory_gib=measured("mem_gb", "use_mem"),
        seconds=measured("sec_per_it", "use_time"),
        oom={"1": True, "0": False}.get(row.get("oom") or ""),
    )


def job_of_row(row: Mapping[str, str]) -> Job:
    """What a row ran. Rows without the mark of Megatron's distributed optimizer ran Megatron-DeepSpeed of 2021 and 2022."""
    of_deepspeed = row.get("zero_stage") != "1(dist-opt)"
    config = Config.model_construct(None, **_settings(row, of_deepspeed))
    balanced = row.get("pp_balanced_embedding") == "1"
    precision: Any = row.get("precision") or "bf16_fp32grad"
    return Job(
        config=config,
        stage_layers=tuple(_stage_layers(config.num_layers, config.pp, balanced=balanced, of_deepspeed=of_deepspeed)),
        precision=precision,
        sharding="distributed" if not of_deepspeed else "none" if row.get("zero_stage") == "0" else "zero1",
        sequence_parallel=not of_deepspeed and config.tp > 1,
        fused_attention=not of_deepspeed,
        learned_positions=of_deepspeed,
        software=(row.get("era") or "").partition(":")[0],
        measured_by="nvidia-smi" if of_deepspeed else "allocated",
    )


def _stage_layers(num_layers: int, num_stages: int, *, balanced: bool, of_deepspeed: bool) -> list[int]:
    """DeepSpeed without balanced ends fills its stages from the first: 78 layers over 12 are eleven times 7, and 1.

    With more stages than layers every stage has one thing, the first one the embedding.
    """
    if balanced or not of_deepspeed:
        return split_layers(num_layers, num_stages, count_ends=balanced)
    if num_layers < num_stages:
        return [0] + [1] * num_layers + [0] * (num_stages - num_layers - 1)
    most = -(-num_layers // num_stages)
    return [min(most, max(0, num_layers - most * stage)) for stage in range(num_stages)]


def _settings(row: Mapping[str, str], of_deepspeed: bool) -> dict[str, Any]:
    def number(name: str, default: int) -> int:
        return int(row.get(name) or 0) or default

    tp, pp, mbs, dp = number("tp", 1), number("pp", 1), number("mbs", 1), number("dp", 1)
    per_node = number("gpus_per_node", load_hardware(row["gpu"]).gpus_per_node)
    num_gpus = tp * pp * dp
    experts = number("experts", 0)
    settings = {
        # Ranks are what the layout says: a node may be used in part.
        "nnodes": -(-num_gpus // per_node) if num_gpus % per_node == 0 else 1,
        "gpus_per_node": per_node if num_gpus % per_node == 0 else num_gpus,
        "num_layers": number("layers", 1),
        "hidden_size": number("hidden", 1),
        "num_heads": number("heads", 1),
        "ffn_hidden_size": number("ffn", 4 * number("hidden", 1)),
        "num_query_groups": number("kv_groups", number("heads", 1)),
        "activation": "swiglu" if row.get("swiglu") == "1" else "gelu",
        "seq_len": number("seq", 1),
        "vocab_size": number("vocab", 1),
        "tp": tp,
        "pp": pp,
        "ep": number("ep", 1),
        "mbsz": mbs,
        "gbsz": number("gbs", mbs * dp),
        "use_moe": experts > 1,
        "num_experts": max(1, experts),
        "topk": number("topk", 1),
        "recompute": row.get("recompute") or "none",
        "distributed_optimizer": row.get("zero_stage") == "1(dist-opt)",
        "dtype": (row.get("precision") or "bf16").partition("_")[0],
    }
    if of_deepspeed:
        settings |= {"normalization": "LayerNorm", "add_bias_linear": True, "tie_embeddings": True}
    return settings
