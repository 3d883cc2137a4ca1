"""Measured runs from a CSV: what each ran as a `Job`, and what was measured. No torch.

Columns as in `profiles/measured_runs.csv`; those of results (mem_gb, oom, sec_per_it) and of trust (use_mem,
use_time, quirk) may be absent or empty. Memory is in GiB, time in seconds per iteration. A column that is
called as a setting of docs/settings.md, in lower case (`moe_ffn_hidden_size`, `etp`, `cp`, `vpp`), is that
setting; empty: what the other columns say. `row_of_job` writes such rows.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from moe_exp.config import Config
from moe_exp.planner.costs.job import Job, MeasuredBy, Sharding
from moe_exp.planner.costs.params import split_layers
from moe_exp.planner.hardware import PROFILES, Hardware, load_hardware

GIBIBYTE = 2**30
MEASURED_RUNS = PROFILES / "measured_runs.csv"
# What a prediction cannot do without. Column to whether 0 is a size, too.
_SIZES = {
    "layers": False,
    "hidden": False,
    "heads": False,
    "seq": False,
    "vocab": False,
    "tp": False,
    "pp": False,
}
_REQUIRED = ("row_id", "gpu", *_SIZES)
_OTHER_NUMBERS = {
    "gpus_per_node": False, "nodes": False, "n_gpus": False, "ffn": False, "kv_groups": False, "dp": False,
    "mbs": False, "gbs": False, "swiglu": True, "experts": True, "topk": True, "ep": True,
    "pp_balanced_embedding": True, "mem_gb": True, "sec_per_it": True,
}  # fmt: skip
_MEASURED = ("mem_gb", "sec_per_it")
_LARGEST = 10**7  # of any number: more are a slip, and as many stages or layers would not fit in memory
_MEASURED_BY: dict[str, Any] = {name: name for name in get_args(MeasuredBy)}
# Optimizer of a run of Megatron-Core, whether its state is sharded, as `zero_stage` has it.
_OF_MEGATRON = {False: "0(dist-opt)", True: "1(dist-opt)"}
_FLAGS = ("oom", "use_mem", "use_time", "quirk", "pp_balanced_embedding")
_WORDS = {
    "precision": ("fp32", "fp16", "bf16", "bf16_fp32grad"),
    "zero_stage": ("0", "1", *_OF_MEGATRON.values()),
    "recompute": ("none", "moe_act", "selective", "full"),
}
# Settings that stand in columns of other names, or in columns with rules of their own.
_IN_COLUMNS = {
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_experts",
    "seq_len",
    "vocab_size",
    "mbsz",
    "gbsz",
    "distributed_optimizer",
    "gpus_per_node",
    "nnodes",
    "dtype",
    "tp",
    "pp",
    "ep",
    "topk",
    "recompute",
}
# Settings that no cost depends on: where and how a run is started, how it learns, its data, what it writes.
FREE = {
    "preset", "master_addr", "master_port", "node_rank", "threads_per_rank", "norm_epsilon", "rotary_base",
    "init_std", "init_distribution", "upcycle_from", "upcycle_granularity", "aux_loss_coeff", "lr", "min_lr",
    "lr_decay_style", "train_iters", "warmup_iters", "decay_iters", "wsd_decay_iters", "rampup_batch_size",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "seed", "train_data", "valid_data",
    "split", "data_order", "allow_other_data", "num_workers", "tokenizer", "data_dir", "run_dir", "run_name",
    "load_dir", "allow_other_model", "save_interval", "save_at_end", "async_save", "keep_last", "keep_every",
    "keep_best", "verify_checkpoint", "exit_interval", "log_interval", "log_timers", "eval_interval",
    "eval_iters", "wandb_project", "wandb_mode", "preflight", "preflight_timeout", "preflight_slow",
    "hang_timeout", "hang_timeout_other", "trace_calls_from", "trace_calls_mb", "trace_calls_in",
}  # fmt: skip
# Backend of the experts in rows of GPUs that do not name one: grouped GEMMs with all that lies between them
# kept.
_UNFUSED = "torch"
_AS_SETTINGS = [name for name in Config.model_fields if name not in _IN_COLUMNS]


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
    """All rows of a CSV; errors as of `read_rows`."""
    return [run_of_row(row) for row in read_rows(path)]


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows of a CSV as they stand there, column to text.

    Raises:
        ValueError: with a line for every cell that is missing or is no such number, by row and column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            rows = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: is no CSV in UTF-8 ({error}). Fix: save it as one.") from None
    if absent := [name for name in _REQUIRED if name not in columns]:
        raise ValueError(
            f"{path}: has no column {', '.join(absent)}. Fix: name the columns as {MEASURED_RUNS.name} of the"
            " package does."
        )
    if not rows:
        raise ValueError(f"{path}: has no rows. Fix: give one line per run after the names of the columns.")
    problems = [
        line
        for number, row in enumerate(rows, start=2)
        for line in _problems(row, f"{path}, row {row['row_id'] or number}")
    ]
    problems += _repeated(rows, path)
    if problems:
        raise ValueError("\n".join(problems))
    return rows


def _repeated(rows: list[dict[str, str]], path: Path) -> Iterator[str]:
    seen: set[str] = set()
    for row in rows:
        if row["row_id"] in seen:
            yield (
                f"{path}, row {row['row_id']}, column row_id: stands there twice. Fix: give every row its own"
                " name."
            )
        seen.add(row["row_id"])


def _problems(row: Mapping[str, Any], where: str) -> Iterator[str]:
    """Lines on all cells of a row that cannot be read."""
    for name in _REQUIRED:
        if not row.get(name):
            yield f"{where}, column {name}: is empty. Fix: give its value."
    for name, zero in (_SIZES | _OTHER_NUMBERS).items():
        if row.get(name) and not _is_number(row[name], zero, whole=name not in _MEASURED):
            kind = "number" if name in _MEASURED else "whole number"
            rule = f"{'0 or more' if zero else 'more than 0'}, at most {_LARGEST:.0e}"
            yield (
                f"{where}, column {name}={row[name]}: must be a {kind}, {rule}. Fix: mend the cell, or leave"
                " it empty if it may be."
            )
    sizes = {name: row.get(name) or "" for name in ("hidden", "heads")}
    if all(_is_number(text, False, whole=True) for text in sizes.values()) and int(sizes["heads"]) > int(
        sizes["hidden"]
    ):
        yield (
            f"{where}, column heads={row['heads']}: is more than hidden={row['hidden']}. Fix: mend the cell."
        )
    for name in _FLAGS:
        if row.get(name) not in (None, "", "0", "1"):
            yield f"{where}, column {name}={row[name]}: must be 0 or 1. Fix: mend the cell."
    for name, words in _WORDS.items():
        if row.get(name) and row[name] not in words:
            yield f"{where}, column {name}={row[name]}: is not known. Fix: use one of {', '.join(words)}."
    for name in _AS_SETTINGS:
        if row.get(name) and (error := _setting(name, row[name])[1]):
            yield f"{where}, column {name}={row[name]}: {error}. Fix: mend the cell, or leave it empty."
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
    return 0 < number <= _LARGEST or (zero and number == 0)


def _setting(name: str, text: str) -> tuple[Any, str]:
    """The value of a setting, and what is wrong with its text."""
    settings: dict[str, Any] = {"gpus_per_node": 1, name: text}
    try:
        return getattr(Config(**settings), name), ""
    except ValidationError as error:
        return None, error.errors()[0]["msg"].removeprefix("Value error, ")


def run_of_row(row: Mapping[str, str]) -> MeasuredRun:
    """A row with what was measured, where that can be trusted."""
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
    """What a row ran: with a plain 0 or 1 as zero_stage Megatron-DeepSpeed of 2021 and 2022, else
    Megatron-Core.
    """
    of_deepspeed = row.get("zero_stage") in ("0", "1")
    config = Config.model_construct(None, **_settings(row, of_deepspeed))
    balanced = row.get("pp_balanced_embedding") == "1"
    stages = _stage_layers(config.num_layers, config.pp, balanced=balanced, of_deepspeed=of_deepspeed)
    if not (of_deepspeed or balanced) and sum(config.stage_layers) == config.num_layers:
        stages = config.stage_layers
    precision: Any = row.get("precision") or "bf16_fp32grad"
    return Job(
        config=config,
        stage_layers=tuple(stages),
        precision=precision,
        sharding=_sharding(row.get("zero_stage"), of_deepspeed),
        sequence_parallel=not of_deepspeed and config.tp > 1,
        fused_attention=not of_deepspeed,
        learned_positions=of_deepspeed,
        software=(row.get("era") or "").partition(":")[0],
        measured_by=_MEASURED_BY.get(
            row.get("mem_kind") or "", "nvidia-smi" if of_deepspeed else "allocated"
        ),
    )


def _sharding(zero_stage: str | None, of_deepspeed: bool) -> Sharding:
    if zero_stage in ("0", _OF_MEGATRON[False]):
        return "none"
    return "zero1" if of_deepspeed else "distributed"


def row_of_job(job: Job, gpu: str) -> dict[str, str]:
    """The columns of a run of this package, of which `job_of_row` makes the same job.

    Settings stand in columns of their own where their value is not what the other columns say.

    Args:
        job: of `Job.of`, with what measures its memory.
        gpu: profile of the device.
    """
    c = job.config
    row: dict[str, object] = {
        "gpu": gpu, "gpus_per_node": c.gpus_per_node, "nodes": c.nnodes, "n_gpus": c.world_size,
        "layers": c.num_layers, "hidden": c.hidden_size, "heads": c.num_heads, "ffn": c.ffn_hidden_size,
        "kv_groups": c.num_query_groups, "swiglu": int(c.activation == "swiglu"),
        "experts": c.num_experts if c.use_moe else 0, "topk": c.topk, "ep": c.ep, "seq": c.seq_len,
        "vocab": c.vocab_size, "tp": c.tp, "pp": c.pp, "dp": c.data_parallel_size or "", "mbs": c.mbsz,
        "gbs": c.gbsz, "zero_stage": _OF_MEGATRON[c.distributed_optimizer], "precision": job.precision,
        "pp_balanced_embedding": 0, "recompute": c.recompute, "mem_kind": job.measured_by, "cp": c.cp,
    }  # fmt: skip
    texts = {name: str(value) for name, value in row.items()}
    implied = job_of_row(texts).config
    for name in _AS_SETTINGS:
        if name not in FREE and (value := getattr(c, name)) != getattr(implied, name):
            texts[name] = "none" if value is None else str(value)
    return texts


def data_parallel_size(row: Mapping[str, str]) -> int | None:
    """As a row says it, or as it follows from its number of GPUs; None where neither is told."""
    if row.get("dp"):
        return int(row["dp"])
    gpus = _num_gpus(row)
    whole, rest = divmod(gpus, int(row["tp"]) * int(row["pp"]) * (int(row.get("cp") or 0) or 1))
    return whole if whole and not rest else None


def _num_gpus(row: Mapping[str, str]) -> int:
    return int(row.get("n_gpus") or 0) or int(row.get("nodes") or 0) * int(row.get("gpus_per_node") or 0)


def contradictions(rows: Sequence[Mapping[str, str]], path: Path) -> Iterator[str]:
    """Lines on rows that `read_rows` took from `path`, but that cannot be right as they stand."""
    known = {*MEASURED_RUNS.read_text().partition("\n")[0].split(","), *_AS_SETTINGS}
    for name in rows[0]:
        if near := (
            difflib.get_close_matches(name, known - {name}, n=1, cutoff=0.8) if name not in known else []
        ):
            yield f"{path}, column {name}: is not read; did you mean {near[0]}?"
    for row in rows:
        if row.get("use_mem") == row.get("use_time") == "0":
            continue  # nothing is taken from it: a sweep's layouts that break a rule are among these
        where = f"{path}, row {row['row_id']}"
        tp, pp, cp = (int(row.get(name) or 0) or 1 for name in ("tp", "pp", "cp"))
        ranks = tp * pp * cp * (data_parallel_size(row) or 1)
        if (gpus := _num_gpus(row)) and gpus != ranks:
            yield f"{where}: {gpus} GPUs, but tp*pp*cp*dp is {ranks}"
        for name, of in (("tp", "heads"), ("ep", "experts")):
            if (size := int(row.get(name) or 0)) > 1 and (whole := int(row.get(of) or 0)) and whole % size:
                yield f"{where}: {name}={size} does not divide {of}={whole}"
        batch = (int(row.get("mbs") or 0) or 1) * (data_parallel_size(row) or 1)
        if (gbs := int(row.get("gbs") or 0)) and gbs < batch:
            yield f"{where}: gbs={gbs} is less than mbs*dp={batch}"


def _stage_layers(num_layers: int, num_stages: int, *, balanced: bool, of_deepspeed: bool) -> list[int]:
    """DeepSpeed without balanced ends fills its stages from the first: 78 layers over 12 are eleven times 7,
    and 1.

    With more stages than layers every stage has one thing, the first one the embedding.
    """
    if balanced or not of_deepspeed:
        return split_layers(num_layers, num_stages, count_ends=balanced)
    if num_layers < num_stages:
        return [0] + [1] * num_layers + [0] * (num_stages - num_layers - 1)
    most = -(-num_layers // num_stages)
    return [min(most, max(0, num_layers - most * stage)) for stage in range(num_stages)]


def _is_cpu(device: str) -> bool:
    """Of a device without a profile, too, which a sweep may write down."""
    try:
        return load_hardware(device).is_cpu
    except ValueError:
        return False


def _settings(row: Mapping[str, str], of_deepspeed: bool) -> dict[str, Any]:
    def number(name: str, default: int) -> int:
        return int(row.get(name) or 0) or default

    tp, pp, mbs, dp = number("tp", 1), number("pp", 1), number("mbs", 1), data_parallel_size(row) or 1
    per_node = number("gpus_per_node", 0) or load_hardware(row["gpu"]).gpus_per_node
    cp = number("cp", 1)
    num_gpus = tp * pp * dp * cp
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
        "distributed_optimizer": row.get("zero_stage") == _OF_MEGATRON[True],
        "dtype": (row.get("precision") or "bf16").partition("_")[0],
    }
    if experts > 1 and not _is_cpu(row["gpu"]):
        # other programs' runs, and those of before there was anything else
        settings["expert_backend"] = _UNFUSED
    if of_deepspeed:
        settings |= {"normalization": "LayerNorm", "add_bias_linear": True, "tie_embeddings": True}
    return settings | {name: _setting(name, row[name])[0] for name in _AS_SETTINGS if row.get(name)}
