"""Reads measured runs from a CSV: each row is a `PlannedJob` with its measurements. Imports no torch.

The columns are those of `profiles/measured_runs.csv`. Results (mem_gb in GiB, oom, sec_per_it in seconds per
iteration) and trust flags (use_mem, use_time, quirk) may be missing or empty. A column can also be a setting
of docs/settings.md, in lower case (`moe_ffn_hidden_size`, `etp`, `cp`, `vpp`); if the cell is empty, other
columns determine the setting. `row_of_job` writes such rows. Further columns of
`profiles/public_runs.csv` describe runs of other training programs (see `Engine`).
"""

import csv
import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from moe_exp.config import TRAITS, Config
from moe_exp.host.files import regular
from moe_exp.planner.costs.job import Engine, MeasuredBy, PlannedJob, Sharding
from moe_exp.planner.costs.params import split_layers
from moe_exp.planner.hardware import PROFILES, Hardware, load_hardware

GIBIBYTE = 2**30
MEASURED_RUNS = PROFILES / "measured_runs.csv"
PUBLIC_RUNS = PROFILES / "public_runs.csv"
_REQUIRED = ("row_id", "gpu", "layers", "hidden", "heads", "seq", "vocab", "tp", "pp")  # for a prediction
# Columns whose numbers are at least 1, and those whose numbers are at least 0.
_SIZES = (*_REQUIRED[2:], "gpus_per_node", "nodes", "n_gpus", "ffn", "kv_groups", "dp", "mbs", "gbs")
_NUMBERS = (
    "swiglu", "experts", "topk", "ep", "pp_balanced_embedding", "mem_gb", "sec_per_it", "num_mtp_layers",
)  # fmt: skip
_MEASURED = ("mem_gb", "sec_per_it")
_LARGEST = 10**7  # larger numbers are typos, and lists of that many stages or layers would not fit in memory
_MEASURED_BY: dict[str, Any] = {name: name for name in get_args(MeasuredBy)}
_OF_MEGATRON = {False: "0(dist-opt)", True: "1(dist-opt)"}  # DISTRIBUTED_OPTIMIZER to zero_stage
# FP8 and FP8_RECIPE with the cost of a precision: current or delayed scaling, blocks of 128, MXFP8, NVFP4
FP8 = {
    "fp8_cs": ("hybrid", "tensorwise"), "fp8_ds": ("hybrid", "tensorwise"), "fp8_sub": ("e4m3", "blockwise"),
    "fp8_mx": ("e4m3", "mxfp8"), "nvfp4": ("e4m3", "mxfp8"),
}  # fmt: skip
_OF_ENGINE = {
    "sharding": ("distopt", "fsdp"),
    "balance": ("forced", "measured", "unknown"),
    "ep_overlap": ("0", "1", "1;delay_wgrad"),
    **dict.fromkeys(
        ("tp_overlap", "static_rows", "fp8_attention", "fp8_param_gather", "clamped_swiglu"), ("0", "1")
    ),
}
_WORDS = {
    **_OF_ENGINE,
    **dict.fromkeys(("oom", "use_mem", "use_time", "quirk", "pp_balanced_embedding"), ("0", "1")),
    "precision": ("fp32", "fp16", "bf16", "bf16_fp32grad", *FP8),
    "zero_stage": ("0", "1", *_OF_MEGATRON.values()),
}
_OTHERS_OF_ENGINE = ("num_mtp_layers", "cuda_graph", "optimizer_dtypes", "pipeline_layout")
# RECOMPUTE by recomputed module, in descending order of recomputation.
_RECOMPUTE = {"full": "full", "moe": "selective", "selective": "selective", "moe_act": "moe_act"}
_MODULES = {"layernorm", "mla_up_proj", "core_attn", "mlp"}
_KNOWN = "|".join(("none", *_RECOMPUTE, *sorted(_MODULES)))
_WHOLE_GRAPHS = ("full_iteration", "local")
_SCOPE = "(attn|mlp|moe_preprocess|moe_router)?"
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
# Text columns: pattern, and the rule in words.
_FORMS = {
    **{name: ("|".join(map(re.escape, of)), f"one of {', '.join(of)}") for name, of in _WORDS.items()},
    "recompute": (rf"({_KNOWN})?(;({_KNOWN})?)*", f"a list of {_KNOWN.replace('|', ', ')}, separated by ;"),
    "cuda_graph": (
        rf"(none|transformer_engine|{'|'.join(_WHOLE_GRAPHS)})(:{_SCOPE}(;{_SCOPE})*)?",
        f"none, {', '.join(_WHOLE_GRAPHS)}, or transformer_engine:SCOPES with scopes from"
        " attn;mlp;moe_preprocess;moe_router",
    ),
    "pipeline_layout": (r"E([tmL|()]|\*\d{1,3})*|[^E].*|.* .*", "like Et*3|(tt|)*29m|L"),
    "optimizer_dtypes": (
        rf"((main_params|main_grads|exp_avg|exp_avg_sq|grad_reduce)=({'|'.join(_BYTES)})(;|$)"
        r"|optimizer=\w+(;|$))+",
        "like main_grads=bf16;exp_avg=fp32;exp_avg_sq=fp32;grad_reduce=bf16",
    ),
}
# Settings whose columns have other names or rules of their own.
_IN_COLUMNS = {
    "num_layers", "hidden_size", "num_heads", "num_experts", "seq_len", "vocab_size", "mbsz", "gbsz",
    "distributed_optimizer", "gpus_per_node", "nnodes", "dtype", "tp", "pp", "ep", "topk", "recompute",
    "cuda_graph",
}  # fmt: skip
FREE = {name for name, it in TRAITS.items() if not it.costs}
_AS_SETTINGS = [name for name in Config.model_fields if name not in _IN_COLUMNS]


@dataclass(frozen=True)
class MeasuredRun:
    """A row of a CSV of measured runs."""

    row_id: str
    section: str  # of the source; rows in a section were measured together
    job: PlannedJob
    hardware: Hardware
    memory_gib: float | None  # of the fullest GPU; None if not measured or not trusted
    seconds: float | None  # per iteration; None if not measured or not trusted
    oom: bool | None  # None if unknown


def read_runs(path: Path) -> list[MeasuredRun]:
    """Reads all runs in a CSV; raises the same errors as `read_rows`."""
    return [run_of_row(row) for row in read_rows(path)]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Reads a CSV's rows as dicts keyed by column; raises ValueError with a line for each invalid cell."""
    try:
        with regular(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            rows = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: must be a UTF-8 CSV file ({error}). Fix: save it as UTF-8 CSV.") from None
    if absent := [name for name in _REQUIRED if name not in columns]:
        fix = f"use the column names of the package's {MEASURED_RUNS.name}"
        raise ValueError(f"{path}: missing columns {', '.join(absent)}. Fix: {fix}.")
    if not rows:
        raise ValueError(f"{path}: no rows. Fix: below the column names, add a line for each run.")
    problems: list[str] = []
    for number, row in enumerate(rows, start=2):
        problems += _problems(row, f"{path}, row {row['row_id'] or number}")
    for name, count in Counter(row["row_id"] for row in rows).items():
        if count > 1:
            problems.append(f"{path}, row {name}, column row_id: duplicate. Fix: use unique names.")
    if problems:
        raise ValueError("\n".join(problems))
    return rows


def _problems(row: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields a line for each invalid cell of a row."""
    for name in _REQUIRED:
        if not row.get(name):
            yield f"{where}, column {name}: is empty. Fix: fill it in."
    for name in (*_SIZES, *_NUMBERS):
        if row.get(name) and not _is_number(row[name], name):
            kind = "number" if name in _MEASURED else "whole number"
            rule = f"must be a {kind} from {int(name in _SIZES)} to {_LARGEST:.0e}"
            fix = "correct the cell, or leave an optional cell empty"
            yield f"{where}, column {name}={row[name]}: {rule}. Fix: {fix}."
    hidden, heads = (row.get(name) or "" for name in ("hidden", "heads"))
    if _is_number(hidden, "hidden") and _is_number(heads, "heads") and int(heads) > int(hidden):
        yield f"{where}, column heads={heads}: must not exceed hidden={hidden}. Fix: correct the cell."
    for name, (form, rule) in _FORMS.items():
        if row.get(name) and not re.fullmatch(form, row[name]):
            yield f"{where}, column {name}={row[name]}: must be {rule}. Fix: correct the cell."
    has_layers = all((row.get(name) or "0").isdecimal() for name in ("layers", "num_mtp_layers"))
    plain = _plain_row(row) if has_layers and row.get("layers") else row
    for name in _AS_SETTINGS:
        if plain.get(name) and (error := _setting(name, plain[name])[1]):
            yield f"{where}, column {name}={row[name]}: {error}. Fix: correct the cell, or leave it empty."
    if row.get("gpu"):
        try:
            load_hardware(row["gpu"])
        except ValueError as error:
            yield f"{where}, column gpu: {error}"


def _is_number(text: str, column: str) -> bool:
    try:
        number = float(text) if column in _MEASURED else int(text)
    except ValueError:
        return False
    return int(column in _SIZES) <= number <= _LARGEST


def _setting(name: str, text: str) -> tuple[Any, str]:
    """Parses a setting's text; returns the value (None if invalid) and an error message (empty if valid)."""
    settings: dict[str, Any] = {"gpus_per_node": 1, name: text}
    try:
        return getattr(Config(**settings), name), ""
    except ValidationError as error:
        return None, error.errors()[0]["msg"].removeprefix("Value error, ")


def run_of_row(row: Mapping[str, str]) -> MeasuredRun:
    """Converts a row to a MeasuredRun; measurements marked as not trusted become None."""
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


def job_of_row(row: Mapping[str, str]) -> PlannedJob:
    """Returns a row's job: a Megatron-DeepSpeed job if zero_stage is 0 or 1, else a Megatron-Core job."""
    engine, row = _engine_of(row), _plain_row(row)
    of_deepspeed = row.get("zero_stage") in ("0", "1")
    config = Config.model_construct(None, **_settings(row, of_deepspeed))
    precision: Any = row.get("precision") or "bf16_fp32grad"
    sharding: Sharding = "zero1" if of_deepspeed else "distributed"
    if row.get("zero_stage") in ("0", _OF_MEGATRON[False]):
        sharding = "none"
    usual = "nvidia-smi" if of_deepspeed else "allocated"
    return PlannedJob(
        config=config, stage_layers=tuple(_stage_layers(row, config, of_deepspeed)), precision=precision,
        sharding=sharding, sequence_parallel=not of_deepspeed and config.tp > 1,
        fused_attention=not of_deepspeed, of_deepspeed=of_deepspeed,
        software=(row.get("era") or "").partition(":")[0],
        measured_by=_MEASURED_BY.get(row.get("mem_kind") or "", usual), engine=engine,
    )  # fmt: skip


def row_of_job(job: PlannedJob, gpu: str) -> dict[str, str]:
    """Inverse of `job_of_row`: returns the row of `job`, omitting settings that other columns imply."""
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
    """Returns a row's DP, if necessary derived from the number of GPUs; None if it cannot be derived."""
    if row.get("dp"):
        return int(row["dp"])
    whole, rest = divmod(_num_gpus(row), _number(row, "tp") * _number(row, "pp") * _number(row, "cp", 1))
    return whole if whole and not rest else None


def _num_gpus(row: Mapping[str, str]) -> int:
    return _number(row, "n_gpus") or _number(row, "nodes") * _number(row, "gpus_per_node")


def _number(row: Mapping[str, str], column: str, default: int = 0) -> int:
    """Returns the number in a cell, or `default` if the cell is missing, empty or 0."""
    return int(row.get(column) or 0) or default


def contradictions(rows: Sequence[Mapping[str, str]], path: Path) -> Iterator[str]:
    """Yields a warning for each inconsistency in `path` that `read_rows` does not reject."""
    tables = (MEASURED_RUNS, PUBLIC_RUNS)
    known = {name for table in tables for name in table.read_text().partition("\n")[0].split(",")}
    known.update(_AS_SETTINGS)
    for name in rows[0]:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near and name not in known:
            yield f"{path}, column {name}: is ignored; did you mean {near[0]}?"
    for row in rows:
        if row.get("use_mem") == row.get("use_time") == "0":
            continue  # unused rows, such as a sweep's invalid layouts
        where = f"{path}, row {row['row_id']}"
        tp, pp, cp, mbs = (_number(row, name, 1) for name in ("tp", "pp", "cp", "mbs"))
        dp = data_parallel_size(row) or 1
        ranks = tp * pp * cp * dp
        if (gpus := _num_gpus(row)) and gpus != ranks:
            yield f"{where}: {gpus} GPUs, but tp*pp*cp*dp is {ranks}"
        for name, of in (("tp", "heads"), ("ep", "experts")):
            if (size := _number(row, name)) > 1 and (whole := _number(row, of)) and whole % size:
                yield f"{where}: {name}={size} must divide {of}={whole}"
        if (gbs := _number(row, "gbs")) and gbs < mbs * dp:
            yield f"{where}: gbs={gbs} is less than mbs*dp={mbs * dp}"


def _stage_layers(row: Mapping[str, str], config: Config, of_deepspeed: bool) -> Sequence[int]:
    """Layers per stage. Unless `pipeline_layout` lists all layers, the training program's rule applies."""
    num_layers, pp = config.num_layers, config.pp
    layout = row.get("pipeline_layout") or ""
    if layout.startswith("E") and " " not in layout:
        # Megatron's layout, such as Et*3|(tt|)*29m|L: chunk i belongs to stage i modulo PP
        text = re.sub(r"\(([^)]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout)
        text = re.sub(r"(\w)\*(\d+)", lambda match: match[1] * int(match[2]), text)
        stages = [0] * pp
        for chunk, part in enumerate(text.split("|")):
            stages[chunk % pp] += part.count("t") + part.count("m")
        if sum(stages) == num_layers:
            return stages
    balanced = row.get("pp_balanced_embedding") == "1"
    if not (of_deepspeed or balanced) and sum(config.stage_layers) == num_layers:
        return config.stage_layers
    if balanced or not of_deepspeed:
        return split_layers(num_layers, pp, count_ends=balanced)
    # DeepSpeed without balanced ends fills the stages in order: 78 layers on 12 stages are 11*7 + 1.
    if num_layers < pp:  # one item each, the first of them the embedding
        return [0] + [1] * num_layers + [0] * (pp - num_layers - 1)
    most = -(-num_layers // pp)
    return [min(most, max(0, num_layers - most * stage)) for stage in range(pp)]


def _settings(row: Mapping[str, str], of_deepspeed: bool) -> dict[str, Any]:
    number = partial(_number, row)
    tp, pp, mbs, dp = number("tp", 1), number("pp", 1), number("mbs", 1), data_parallel_size(row) or 1
    per_node = number("gpus_per_node") or load_hardware(row["gpu"]).gpus_per_node
    num_gpus, experts = tp * pp * dp * number("cp", 1), number("experts")
    # From the layout, not the `nodes` column: a run may use only part of a node.
    nodes = (-(-num_gpus // per_node), per_node) if num_gpus % per_node == 0 else (1, num_gpus)
    hidden, heads = number("hidden", 1), number("heads", 1)
    settings: dict[str, Any] = {
        "nnodes": nodes[0], "gpus_per_node": nodes[1], "num_layers": number("layers", 1),
        "hidden_size": hidden, "num_heads": heads, "ffn_hidden_size": number("ffn", 4 * hidden),
        "num_query_groups": number("kv_groups", heads), "seq_len": number("seq", 1),
        "activation": "swiglu" if row.get("swiglu") == "1" else "gelu", "vocab_size": number("vocab", 1),
        "tp": tp, "pp": pp, "ep": number("ep", 1), "mbsz": mbs, "gbsz": number("gbs", mbs * dp),
        "use_moe": experts > 1, "num_experts": max(1, experts), "topk": number("topk", 1),
        "recompute": row.get("recompute") or "none",
        "distributed_optimizer": row.get("zero_stage") == _OF_MEGATRON[True],
        "dtype": (row.get("precision") or "bf16").partition("_")[0],
    }  # fmt: skip
    is_cpu = False
    with suppress(ValueError):  # a sweep may record a device without a profile
        is_cpu = load_hardware(row["gpu"]).is_cpu
    if not is_cpu:
        # The rows come from other programs or older versions, which had neither Triton loss nor kernels, and
        # whose grouped GEMMs kept all intermediate activations.
        settings |= {"cross_entropy": "megatron", "main_params": "fp32"}
        settings |= {"expert_backend": "torch"} if experts > 1 else {}
    if of_deepspeed:
        settings |= {"normalization": "LayerNorm", "add_bias_linear": True, "tie_embeddings": True}
    return settings | {name: _setting(name, row[name])[0] for name in _AS_SETTINGS if row.get(name)}


def _plain_row(row: Mapping[str, str]) -> Mapping[str, str]:
    """Replaces a row's values that only `Engine` describes: each becomes this package's closest setting."""
    modules, precision = (row.get("recompute") or "").split(";"), row.get("precision") or ""
    has_engine = (
        any(row.get(name) for name in (*_OF_ENGINE, *_OTHERS_OF_ENGINE))
        or len(set(modules)) > 1
        or precision in FP8
        or row.get("dispatcher") == "hybridep"
        or {*_MODULES, "moe"} & set(modules)
    )
    if not has_engine:
        return row
    fp8, recipe = FP8.get(precision, ("none", "tensorwise"))
    others = {"recompute": next((_RECOMPUTE[name] for name in _RECOMPUTE if name in modules), "none")}
    others["layers"] = str(_number(row, "layers") + _number(row, "num_mtp_layers"))
    if precision in (*FP8, "bf16"):
        others |= {"precision": "", "fp8": fp8, "fp8_recipe": recipe}
    if row.get("dispatcher") == "hybridep":
        others["dispatcher"] = "deepep"
    return {**row, **others}


def _engine_of(row: Mapping[str, str]) -> Engine:
    types = dict(part.split("=") for part in (row.get("optimizer_dtypes") or "").split(";") if part)
    gradient = _BYTES.get(types.get("main_grads", "fp32"), 4.0)
    moments = [_BYTES.get(types.get(name, "fp32"), 4.0) for name in ("exp_avg", "exp_avg_sq")]
    kind, _, scopes = (row.get("cuda_graph") or "").partition(":")
    graphs = {"all"} if kind in _WHOLE_GRAPHS else set(filter(None, scopes.split(";")))
    return Engine(
        dispatcher="hybridep" if row.get("dispatcher") == "hybridep" else "",
        overlaps_exchange=(row.get("ep_overlap") or "").startswith("1"),
        overlaps_tensor_parallel=row.get("tp_overlap") == "1", graphs=frozenset(graphs),
        recompute=frozenset((row.get("recompute") or "").split(";")) & _MODULES,
        static_rows=row.get("static_rows") == "1", is_nvfp4=row.get("precision") == "nvfp4",
        fp8_attention=row.get("fp8_attention") == "1", shards_parameters=row.get("sharding") == "fsdp",
        gradient_bytes=gradient, reduced_bytes=_BYTES.get(types.get("grad_reduce", ""), gradient),
        gathered_bytes=1.0 if row.get("fp8_param_gather") == "1" else None,
        state_bytes=4.0 + sum(moments) if types else None, num_mtp_layers=_number(row, "num_mtp_layers"),
        clamped_swiglu=row.get("clamped_swiglu") == "1", balanced=row.get("balance") == "forced",
    )  # fmt: skip
