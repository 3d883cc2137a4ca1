"""Layouts that a search tries, and the rules that exclude layouts. Does not import torch.

A layout is a Config, so the rules of training apply to it. `Config.problems` is
checked level by level: tensor and context parallelism, pipeline, experts, micro-batch. At each level, sizes
of later levels are 1. If a level rejects its sizes, all layouts with these sizes are excluded, so hundreds of
checks cover millions of layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from moe_exp.config import Config, problem
from moe_exp.planner.costs.params import count_parameters, split_layers, stages_text

# Settings that a search chooses; world size, batch and sequence length are given.
SPLIT_SETTINGS = ("first_stage_layers", "last_stage_layers", "pipeline_layers")
LAYOUT_SETTINGS = (
    "tp", "pp", *SPLIT_SETTINGS, "vpp", "ep", "etp", "cp", "mbsz", "recompute", "recompute_modules",
    "offload_modules",
)  # fmt: skip
RECOMPUTE = ("none", "moe_act", "selective", "full")  # fastest to smallest
_ONE: dict[str, Any] = {name: Config.model_fields[name].default for name in LAYOUT_SETTINGS} | {"mbsz": 1}
_HOST = "; host: "  # in a level, before the modules of OFFLOAD_MODULES
_LARGEST_MICROBATCH, _LARGEST_VPP = 64, 8
OUT_OF_MEMORY = "out of memory"
NOT_NEEDED = "more recompute than the memory requires"
TOO_SLOW = "layers and bubble alone take 1.5 times the best iteration"
# Reason to count, by the setting that a rule of training names.
_REASONS = {
    "gpus_per_node": "GPUs are not a multiple of TP*PP*CP, or of ETP*EP*PP",
    "tp": "TP does not divide heads, key/value heads, MLP, vocabulary or sequence",
    "cp": "the sequence is not a multiple of 2*CP",
    **dict.fromkeys(("pp", *SPLIT_SETTINGS), "layers cannot be split over PP stages"),
    "ep": "EP does not divide the experts",
    "etp": "ETP does not divide the expert's width",
    "gbsz": "the global batch is not a multiple of MBSZ*DP",
    "rampup_batch_size": "a step of the batch ramp-up is not a multiple of MBSZ*DP",
    "data_stages": "a batch in DATA_STAGES is not a multiple of its micro-batch times DP",
    "vpp": "VPP does not divide the layers of a stage, or micro-batches are not a multiple of PP",
    "over_nodes": "TP spans nodes",
}


@dataclass(frozen=True)
class Space:
    """Values to try for each setting, in ascending order (VPP=none first; recompute from least to most)."""

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    vpp: tuple[int | None, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...] | None  # None: 1 and TP
    cp: tuple[int, ...]
    mbsz: tuple[int, ...]
    recompute: tuple[str, ...]  # levels, see `recompute_settings`
    stages: tuple[dict[str, Any], ...] | None  # settings of the layer split; None: see `stage_splits`

    @classmethod
    def of(cls, config: Config, fixed: Mapping[str, Sequence[Any]] | None = None) -> Space:
        """Returns the values to try for a model. Settings that are not in `fixed` get a default list."""
        fixed = fixed or {}
        world, per_node, num_experts = config.world_size, config.gpus_per_node, config.num_experts
        powers = [2**power for power in range(max(world, config.gbsz).bit_length())]
        # With fewer than 8192 tokens per rank, context parallelism costs more than it saves.
        longest = min(world, max(1, config.seq_len // 8192))
        levels: Sequence[str] = ["none", "selective", "full"]
        if config.use_moe and (config.fp8 == "none" or config.is_fp8_by_kernels):
            others = {
                "shared_expert": config.shared_expert_size,
                "mla_up_proj": config.multi_latent_attention,
            }
            modules = ["experts", *(name for name, is_there in others.items() if is_there)]
            levels = [*levels, *{"experts", ",".join(modules)}, f"experts{_HOST}attention"]
        elif not config.use_moe and config.fp8 == "none":
            levels = [*levels, f"none{_HOST}attention,mlp"]
        levels = list(filter(None, fixed.get("recompute_modules", ()))) or fixed.get("recompute") or levels
        if "offload_modules" in fixed:
            moved = f"{_HOST}{fixed['offload_modules'][0]}" if fixed["offload_modules"][0] else ""
            levels = list({level.partition(_HOST)[0] + moved for level in levels})
            tried = {level: config.model_copy(update=recompute_settings(level)) for level in levels}
            levels = [level for level in levels if not any(tried[level].offload_problems())]
        chosen: dict[str, Sequence[Any]] = {
            "tp": _divisors(per_node, per_node),
            "pp": _divisors(world, min(config.num_layers, world)),
            "vpp": [None, *range(2, _LARGEST_VPP + 1)],
            "ep": _divisors(num_experts, min(num_experts, world)) if config.use_moe else [1],
            "cp": [size for size in powers if size <= longest],
            "mbsz": [size for size in powers if size <= min(config.gbsz, _LARGEST_MICROBATCH)],
            "recompute": levels,
        }
        chosen |= {name: fixed[name] for name in chosen if name in fixed and name != "recompute"}

        def order(value: Any) -> float:  # recompute by amount; VPP=none before numbers
            if not isinstance(value, str):
                return value or 0
            again, moves, _ = value.partition(_HOST)
            level = RECOMPUTE.index(again) if again in RECOMPUTE else 1 + len(again) / 1000
            return level + (0.9 if moves else 0.0)

        ascending: dict[str, tuple[Any, ...]] = {
            name: tuple(sorted(set(values), key=order)) for name, values in chosen.items()
        }
        etp = tuple(sorted(set(fixed["etp"]))) if "etp" in fixed else None if config.use_moe else (1,)
        splits = {name: fixed[name] for name in SPLIT_SETTINGS if name in fixed}
        stages = tuple(dict(zip(splits, values, strict=True)) for values in product(*splits.values()))
        return cls(**ascending, etp=etp, stages=stages if splits else None)

    def etps(self, tp: int) -> tuple[int, ...]:
        """Returns the expert-tensor-parallel sizes to try with a tensor-parallel size."""
        return self.etp if self.etp is not None else tuple(sorted({1, tp}))


def recompute_settings(level: str) -> dict[str, str]:
    """Converts a level in `Space.recompute` to settings. The level is a value of RECOMPUTE or of
    RECOMPUTE_MODULES, and may be followed by modules to offload.
    """
    again, _, moved = level.partition(_HOST)
    is_list = again not in RECOMPUTE
    settings = {"recompute": "none" if is_list else again, "recompute_modules": again if is_list else ""}
    return settings | {"offload_modules": moved}


def recompute_level(config: Config) -> str:
    """Returns the level in `Space.recompute` that stands for the settings in `config`."""
    level = config.recompute_modules or config.recompute
    return f"{level}{_HOST}{config.offload_modules}" if config.offload_modules else level


def _divisors(number: int, largest: int) -> list[int]:
    return [size for size in range(1, largest + 1) if number % size == 0]


@dataclass(frozen=True)
class Family:
    """Set of layouts that differ only in expert parallelism, micro-batch size, model chunks and recompute."""

    config: Config  # with these settings at 1, none or unset
    experts: list[tuple[int, int]]  # pairs of EP and ETP
    batches: dict[int | None, list[int]]  # valid micro-batch sizes by model chunks (VPP)


def with_layout(config: Config, **layout: Any) -> Config:
    """Returns `config` with these layout settings; all other layout settings become 1, none or 0."""
    return config.model_copy(update=_ONE | layout)


def model_problems(config: Config) -> list[str]:
    """Returns the problems that no layout can fix. To find them, checks the settings for one GPU."""
    alone: dict[str, Any] = {"nnodes": 1, "gpus_per_node": 1, "node_rank": 0}
    alone |= {"profile_ranks": "0", "dump_ranks": ""}  # checked below, with the real number of ranks
    if config.dispatcher == "deepep":  # requires EP > 1; checked with each EP
        alone["dispatcher"] = "alltoall"
    of_ranks = [line for line in config.problems() if line.startswith(("PROFILE_RANKS=", "DUMP_RANKS="))]
    return [*with_layout(config, **alone).problems(), *of_ranks]


def layout_problems(config: Config) -> list[str]:
    """Returns all problems of a layout, under the rules of training and those of the search."""
    return [*config.problems(), *_over_nodes(config)]


def _over_nodes(config: Config) -> Iterator[str]:
    if config.nnodes > 1 and config.gpus_per_node % config.tp:
        per_node = config.gpus_per_node
        rule = f"must divide GPUS_PER_NODE={per_node}, or every layer waits for the network between nodes"
        sizes = ", ".join(map(str, _divisors(per_node, per_node)))
        yield problem("tp", config.tp, rule, f"set TP to one of {sizes}")


def families(config: Config, space: Space, rejected: Counter[str]) -> Iterator[Family]:
    """Yields valid layouts in `space`; counts invalid ones in `rejected`. Call `model_problems` first."""
    for tp, cp in product(space.tp, space.cp):
        leaves = len(space.ep) * len(space.etps(tp)) * len(space.mbsz) * len(space.vpp) * len(space.recompute)
        splits = {pp: space.stages or stage_splits(config, pp) for pp in space.pp}
        outer = with_layout(config, tp=tp, cp=cp, **_any_batch(config))
        reason = _REASONS["over_nodes"] if any(_over_nodes(outer)) else _reason(outer)
        if reason:
            rejected[reason] += leaves * sum(map(len, splits.values()))
            continue
        for pp, stages in splits.items():
            if config.world_size % (tp * cp * pp):  # `problems` would find this more slowly
                rejected[_REASONS["gpus_per_node"]] += leaves * len(stages)
                continue
            for split in stages:
                inner = outer.model_copy(update={"pp": pp, **split})
                if reason := _reason(inner):
                    rejected[reason] += leaves
                else:
                    given = {name: getattr(config, name) for name in _any_batch(config)}
                    yield _family(inner.model_copy(update=given), space, rejected)


def _any_batch(config: Config) -> dict[str, Any]:
    """Returns batch settings that suit any layout, to check layouts before a micro-batch size is set."""
    return {"gbsz": config.world_size, "rampup_batch_size": "", "data_stages": ""}


def _reason(config: Config, fallback: str = "") -> str:
    """Reason of the first problem that is in `_REASONS`, `fallback` if none is; '' if no problems."""
    names = [line.partition("=")[0].lower() for line in config.problems()]
    return next((_REASONS[name] for name in names if name in _REASONS), fallback if names else "")


def _family(config: Config, space: Space, rejected: Counter[str]) -> Family:
    per_expert = len(space.mbsz) * len(space.vpp) * len(space.recompute)
    experts = []
    for ep, etp in product(space.ep, space.etps(config.tp)):
        # Problems with any setting count: dispatchers and grouped GEMMs also have rules about EP and ETP.
        split = config.model_copy(update={"ep": ep, "etp": etp} | _any_batch(config))
        if reason := _reason(split, "EP and ETP are not supported for these experts"):
            rejected[reason] += per_expert
        else:
            experts.append((ep, etp))
    weight = len(experts) * len(space.recompute)
    batches: dict[int | None, list[int]] = {vpp: [] for vpp in space.vpp}
    for mbsz in space.mbsz if experts else ():
        if config.gbsz % (mbsz * config.data_parallel_size):
            rejected[_REASONS["gbsz"]] += weight * len(space.vpp)
            continue
        for vpp, sizes in batches.items():
            ep, etp = experts[0]
            inner = config.model_copy(update={"mbsz": mbsz, "vpp": vpp, "ep": ep, "etp": etp})
            # The VPP rules of `problems`, repeated here because this is faster and many layouts violate them.
            chunks_fit = vpp is None or (
                config.pp > 1
                and not any(n % vpp for n in config.stage_layers)
                and not config.num_microbatches // mbsz % config.pp
            )
            if not chunks_fit:
                rejected[_REASONS["vpp"]] += weight
            elif reason := _reason(inner):
                rejected[reason] += weight
            else:
                sizes.append(mbsz)
    return Family(config, experts, batches)


def stage_splits(config: Config, num_stages: int) -> tuple[dict[str, Any], ...]:
    """Returns the layer splits to try, each as a dict of settings; {} is an even split. If the
    vocabulary is large, a second split counts the embedding and the output layer as one layer each. If the
    vocabulary is very large, a third split counts the output layer as several layers.
    """
    if num_stages == 1:
        return ({},)
    is_even, count = config.num_layers % num_stages == 0, count_parameters(config)
    # cost of the output layer in layers, by active weights
    layer = (count.active_per_token - count.embedding) / config.num_layers
    weight = count.embedding / (1 if config.tie_embeddings else 2) / layer
    splits = [split_layers(config.num_layers, num_stages)]
    if weight >= 0.5:  # a cheaper output layer is closer to no layer than to one
        splits.append(split_layers(config.num_layers, num_stages, count_ends=True))
    if (output := round(weight)) > 1:  # the output layer counts as `output` layers, the embedding as one
        last = max(0, round((config.num_layers + 1 + output) / num_stages) - output)
        first, *others = split_layers(config.num_layers - last + 1, num_stages - 1)
        splits.append([first - 1, *others, last])
    texts = dict.fromkeys(stages_text(split) for split in splits if min(split) >= 0 and all(split[1:-1]))
    return tuple({} if is_even and "," not in text else {"pipeline_layers": text} for text in texts) or ({},)
