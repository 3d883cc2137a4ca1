"""Columns of a CSV that say what the program of a run did: those of `profiles/public_runs.csv`. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from moe_exp.planner.costs.job import OURS, Engine

# FP8 and FP8_RECIPE that cost what a precision does: current or delayed scaling, blocks of 128, MXFP8, NVFP4
FP8 = {
    "fp8_cs": ("hybrid", "tensorwise"), "fp8_ds": ("hybrid", "tensorwise"), "fp8_sub": ("e4m3", "blockwise"),
    "fp8_mx": ("e4m3", "mxfp8"), "nvfp4": ("e4m3", "mxfp8"),
}  # fmt: skip
# Module that is computed again to RECOMPUTE, the most first.
_RECOMPUTE = {"full": "full", "moe": "selective", "selective": "selective", "moe_act": "moe_act"}
_MODULES = {"layernorm", "mla_up_proj", "core_attn", "mlp"}
_SCOPES = {"attn", "mlp", "moe_router", "moe_preprocess"}
_WHOLE_GRAPHS = ("full_iteration", "local")
_WORDS = {
    "sharding": ("distopt", "fsdp"),
    "balance": ("forced", "measured", "unknown"),
    "tp_overlap": ("0", "1"),
    "static_rows": ("0", "1"),
    "fp8_attention": ("0", "1"),
    "fp8_param_gather": ("0", "1"),
    "clamped_swiglu": ("0", "1"),
    "ep_overlap": ("0", "1", "1;delay_wgrad"),
}
_NUMBERS = ("num_mtp_layers", "sliding_window")
_OTHERS = ("cuda_graph", "optimizer_dtypes", "pipeline_layout")
_DTYPES = re.compile(
    r"((main_params|main_grads|exp_avg|exp_avg_sq|grad_reduce)=(fp32|bf16|fp16|fp8)(;|$)|optimizer=\w+(;|$))+"
)
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
_LAYOUT = re.compile(r"E([tmL|()]|\*\d{1,3})*")


def has_engine(row: Mapping[str, str]) -> bool:
    """Whether a row says anything about the program."""
    modules = set((row.get("recompute") or "").split(";"))
    is_said = any(row.get(name) for name in (*_WORDS, *_NUMBERS, *_OTHERS)) or len(modules) > 1
    return (
        is_said
        or row.get("precision") in FP8
        or row.get("dispatcher") == "hybridep"
        or bool(modules & {*_MODULES, "moe"})
    )


def problems_of(row: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(column, rule that it breaks) of a row."""
    for name, words in _WORDS.items():
        if row.get(name) and row[name] not in words:
            yield name, f"must be one of {', '.join(words)}"
    for name in _NUMBERS:
        if row.get(name) and not (row[name].isdecimal() and int(row[name]) < 10**7):
            yield name, "must be a whole number, 0 or more"
    known = {"none", *_RECOMPUTE, *_MODULES, "selective"}
    if unknown := set(filter(None, (row.get("recompute") or "").split(";"))) - known:
        yield (
            "recompute",
            f"{sorted(unknown)[0]} is not known; use none or some of {', '.join(sorted(known))}",
        )
    kind, _, scopes = (row.get("cuda_graph") or "none").partition(":")
    if (
        kind not in ("none", "transformer_engine", *_WHOLE_GRAPHS)
        or set(filter(None, scopes.split(";"))) - _SCOPES
    ):
        scope = f"transformer_engine:SCOPES with some of {';'.join(sorted(_SCOPES))}"
        yield "cuda_graph", f"must be none, {', '.join(_WHOLE_GRAPHS)}, or {scope}"
    layout = row.get("pipeline_layout") or ""
    if layout.startswith("E") and " " not in layout and not _LAYOUT.fullmatch(layout):
        yield "pipeline_layout", "must be like Et*3|(tt|)*29m|L"
    if row.get("optimizer_dtypes") and not _DTYPES.fullmatch(row["optimizer_dtypes"]):
        yield "optimizer_dtypes", "must be like main_grads=bf16;exp_avg=fp32;exp_avg_sq=fp32;grad_reduce=bf16"


def plain_row(row: Mapping[str, str]) -> Mapping[str, str]:
    """The row as if this package had run it: without what `Engine` says."""
    if not has_engine(row):
        return row
    fp8, recipe = FP8.get(row.get("precision") or "", ("none", "tensorwise"))
    modules = (row.get("recompute") or "").split(";")
    others = {"recompute": next((_RECOMPUTE[name] for name in _RECOMPUTE if name in modules), "none")}
    others["layers"] = str(int(row["layers"]) + int(row.get("num_mtp_layers") or 0))
    if row.get("precision") in (*FP8, "bf16"):
        others |= {"precision": "", "fp8": fp8, "fp8_recipe": recipe}
    if row.get("dispatcher") == "hybridep":
        others["dispatcher"] = "deepep"
    return {**row, **others}


def engine_of(row: Mapping[str, str]) -> Engine:
    """The program of a row."""
    if not has_engine(row):
        return OURS
    types = dict(part.split("=") for part in (row.get("optimizer_dtypes") or "").split(";") if part)
    gradient = _BYTES.get(types.get("main_grads", "fp32"), 4.0)
    moments = [_BYTES.get(types.get(name, "fp32"), 4.0) for name in ("exp_avg", "exp_avg_sq")]
    kind, _, scopes = (row.get("cuda_graph") or "").partition(":")
    graphs = {"all"} if kind in _WHOLE_GRAPHS else set(filter(None, scopes.split(";")))
    return Engine(
        dispatcher="hybridep" if row.get("dispatcher") == "hybridep" else "",
        overlaps_exchange=(row.get("ep_overlap") or "").startswith("1"),
        overlaps_tensor_parallel=row.get("tp_overlap") == "1",
        graphs=frozenset(graphs),
        recompute=frozenset((row.get("recompute") or "").split(";")) & _MODULES,
        static_rows=row.get("static_rows") == "1",
        is_nvfp4=row.get("precision") == "nvfp4",
        fp8_attention=row.get("fp8_attention") == "1",
        shards_parameters=row.get("sharding") == "fsdp",
        gradient_bytes=gradient,
        reduced_bytes=_BYTES.get(types.get("grad_reduce", ""), gradient),
        gathered_bytes=1.0 if row.get("fp8_param_gather") == "1" else None,
        state_bytes=4.0 + sum(moments) if types else None,
        num_mtp_layers=int(row.get("num_mtp_layers") or 0),
        clamped_swiglu=row.get("clamped_swiglu") == "1",
        window=int(row.get("sliding_window") or 0),
        balanced=row.get("balance") == "forced",
    )


def stage_layers_of(row: Mapping[str, str], pp: int, num_layers: int) -> tuple[int, ...] | None:
    """Layers of every stage by a layout like `Et*3|(tt|)*29m|L`: chunk i is of stage i modulo PP. None if the
    row has no such layout, or one of another number of layers.
    """
    layout = row.get("pipeline_layout") or ""
    if not layout.startswith("E") or " " in layout:
        return None
    text = re.sub(r"\(([^)]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout)
    text = re.sub(r"(\w)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    stages = [0] * pp
    for chunk, part in enumerate(text.split("|")):
        stages[chunk % pp] += part.count("t") + part.count("m")
    return tuple(stages) if sum(stages) == num_layers else None
