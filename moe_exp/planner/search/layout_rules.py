"""Which layouts a search tries and which of them cannot be. No torch.

A layout is a Config with its layout settings filled in, so the rules are those of training itself:
`checks.check_config` is asked, level by level (tensor and context parallel, pipeline, experts, micro-batch),
with what is decided further down left at 1. What one level refuses stands for all layouts below it: millions
are counted, hundreds are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from moe_exp.config import Config, problem
from moe_exp.config.checks.checks import check_config
from moe_exp.planner.costs.params import count_parameters, split_layers, stages_text

# What a search decides, in the order in which people say it. World size, batch and sequence are given.
SPLIT_SETTINGS = ("first_stage_layers", "last_stage_layers", "pipeline_layers")
LAYOUT_SETTINGS = ("tp", "pp", *SPLIT_SETTINGS, "vpp", "ep", "etp", "cp", "mbsz", "recompute")
RECOMPUTE = ("none", "moe_act", "selective", "full")  # from the fastest to the smallest
_ONE: dict[str, Any] = {
    **dict.fromkeys(("tp", "pp", "ep", "etp", "cp", "mbsz"), 1),
    **dict.fromkeys(("first_stage_layers", "last_stage_layers"), 0), "pipeline_layers": "", "vpp": None,
    "recompute": "none",
}  # fmt: skip
# A rank with fewer tokens of a sequence has little to compute and much to send.
_MIN_TOKENS_PER_CP_RANK = 8192
_LARGEST_MICROBATCH, _LARGEST_VPP = 64, 8
# In layers that its output layer is worth: with fewer, counting it as one would be further from the truth
# than not counting it.
_LARGE_VOCABULARY = 0.5
OUT_OF_MEMORY = "out of memory"
NOT_NEEDED = "recomputes more than the memory asks for"
TOO_SLOW = "layers and bubble alone take 1.5 times the best iteration"
# Setting that a rule of training names to what is counted under it.
_REASONS = {
    "gpus_per_node": "GPUs are not a multiple of TP*PP*CP, or of ETP*EP*PP",
    "tp": "TP does not divide heads, key/value heads, MLP, vocabulary or sequence",
    "cp": "the sequence is not a multiple of 2*CP",
    "pp": "layers do not split over PP stages",
    "first_stage_layers": "layers do not split over PP stages",
    "last_stage_layers": "layers do not split over PP stages",
    "pipeline_layers": "layers do not split over PP stages",
    "ep": "EP does not divide the experts",
    "etp": "ETP does not divide the expert's width",
    "gbsz": "the global batch is not a multiple of MBSZ*DP",
    "rampup_batch_size": "a step of the batch ramp-up is not a multiple of MBSZ*DP",
    "vpp": "VPP does not divide the layers of a stage, or micro-batches are no multiple of PP",
    "over_nodes": "TP reaches over nodes",
}


@dataclass(frozen=True)
class Space:
    """What is tried of each setting; sizes ascend, so that what holds for one holds for the larger.

    Attributes:
        etp: None: 1 and TP.
        stages: settings of the split over stages; None: those of `stage_splits`.
    """

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    vpp: tuple[int | None, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...] | None
    cp: tuple[int, ...]
    mbsz: tuple[int, ...]
    recompute: tuple[str, ...]
    stages: tuple[dict[str, Any], ...] | None

    @classmethod
    def of(cls, config: Config, fixed: Mapping[str, Sequence[Any]] | None = None) -> Space:
        """The usual values for a model, or for a setting in `fixed` those given."""
        fixed = fixed or {}
        world, per_node = config.world_size, config.gpus_per_node
        chosen: dict[str, Sequence[Any]] = {
            "tp": [size for size in range(1, per_node + 1) if per_node % size == 0],
            "pp": [size for size in range(1, min(config.num_layers, world) + 1) if world % size == 0],
            "vpp": [None, *range(2, _LARGEST_VPP + 1)],
            "ep": (
                [
                    size
                    for size in range(1, min(config.num_experts, world) + 1)
                    if config.num_experts % size == 0
                ]
                if config.use_moe
                else [1]
            ),
            "cp": [
                size
                for size in _powers_of_two(world)
                if size == 1 or config.seq_len // size >= _MIN_TOKENS_PER_CP_RANK
            ],
            "mbsz": _powers_of_two(min(config.gbsz, _LARGEST_MICROBATCH)),
            "recompute": ("none", "selective", "full"),
        } | {name: values for name, values in fixed.items() if name not in ("etp", *SPLIT_SETTINGS)}
        ascending: dict[str, tuple[Any, ...]] = {
            name: tuple(sorted(set(v), key=_order)) for name, v in chosen.items()
        }
        etp = tuple(sorted(set(fixed["etp"]))) if "etp" in fixed else None if config.use_moe else (1,)
        splits = {name: fixed[name] for name in SPLIT_SETTINGS if name in fixed}
        stages = (
            tuple(dict(zip(splits, values, strict=True)) for values in product(*splits.values()))
            if splits
            else None
        )
        return cls(**ascending, etp=etp, stages=stages)

    def etps(self, tp: int) -> tuple[int, ...]:
        """Expert tensor parallel sizes that go with a tensor parallel size."""
        return self.etp if self.etp is not None else tuple(sorted({1, tp}))


def _powers_of_two(largest: int) -> list[int]:
    return [2**power for power in range(largest.bit_length())]


def _order(value: Any) -> int:
    """None (no model chunks) before numbers; recompute by how much."""
    return RECOMPUTE.index(value) if isinstance(value, str) else value or 0


@dataclass(frozen=True)
class Family:
    """Layouts that differ in experts' parallelism, micro-batch, model chunks and recompute alone; every
    combination is allowed.

    Attributes:
        config: the settings, those four left at 1.
        experts: pairs of EP and ETP.
        batches: model chunks to the micro-batch sizes that they allow.
    """

    config: Config
    experts: list[tuple[int, int]]
    batches: dict[int | None, list[int]]


def with_layout(config: Config, **layout: Any) -> Config:
    """The settings with a layout; what is not given is 1, none or 0."""
    return config.model_copy(update=_ONE | layout)


def model_problems(config: Config) -> list[str]:
    """Lines on what no layout would mend: the checks of training for one GPU."""
    alone: dict[str, Any] = {"nnodes": 1, "gpus_per_node": 1, "node_rank": 0}
    if config.dispatcher == "deepep":  # which needs EP > 1; looked at with every EP
        alone["dispatcher"] = "alltoall"
    return check_config(with_layout(config, **alone))


def layout_problems(config: Config) -> list[str]:
    """Lines on all that is wrong with one layout: the checks of training, and what a search asks for beside
    them.
    """
    return [*check_config(config), *_over_nodes(config)]


def _over_nodes(config: Config) -> Iterator[str]:
    if config.nnodes > 1 and config.gpus_per_node % config.tp:
        rule = (
            f"would reach over nodes of GPUS_PER_NODE={config.gpus_per_node}, every layer would wait for the"
            " network"
        )
        sizes = ", ".join(
            str(size) for size in range(1, config.gpus_per_node + 1) if config.gpus_per_node % size == 0
        )
        yield problem("tp", config.tp, rule, f"set TP to one of {sizes}")


def families(config: Config, space: Space, rejected: Counter[str]) -> Iterator[Family]:
    """What the rules leave of a space.

    Args:
        config: the settings, without problems of the model itself.
        space: what to try.
        rejected: how many layouts each reason refused; counted up.
    """
    for tp, cp in product(space.tp, space.cp):
        leaves = len(space.ep) * len(space.etps(tp)) * len(space.mbsz) * len(space.vpp) * len(space.recompute)
        splits = {pp: space.stages or stage_splits(config, pp) for pp in space.pp}
        outer = with_layout(config, tp=tp, cp=cp, **_any_batch(config))
        reason = _REASONS["over_nodes"] if any(_over_nodes(outer)) else _reason(outer)
        if reason:
            rejected[reason] += leaves * sum(map(len, splits.values()))
            continue
        for pp, stages in splits.items():
            if config.world_size % (tp * cp * pp):  # said by check_config as well, but slower
                rejected[_REASONS["gpus_per_node"]] += leaves * len(stages)
                continue
            for split in stages:
                inner = outer.model_copy(update={"pp": pp, **split})
                if reason := _reason(inner):
                    rejected[reason] += leaves
                else:
                    given = {"gbsz": config.gbsz, "rampup_batch_size": config.rampup_batch_size}
                    yield _family(inner.model_copy(update=given), space, rejected)


def _any_batch(config: Config) -> dict[str, Any]:
    """A batch that every layout divides: for levels that do not decide on the micro-batch."""
    return {"gbsz": config.world_size, "rampup_batch_size": ""}


def _reason(config: Config, fallback: str = "") -> str:
    """The first reason among those that name a layout setting, or `fallback` where only others do."""
    names = [line.partition("=")[0].lower() for line in check_config(config)]
    return next((_REASONS[name] for name in names if name in _REASONS), fallback if names else "")


def _family(config: Config, space: Space, rejected: Counter[str]) -> Family:
    per_expert = len(space.mbsz) * len(space.vpp) * len(space.recompute)
    experts = []
    for ep, etp in product(space.ep, space.etps(config.tp)):
        # Any name counts here: dispatchers and grouped products have rules about EP and ETP, too.
        if reason := _reason(
            config.model_copy(update={"ep": ep, "etp": etp} | _any_batch(config)),
            "the experts cannot be split so",
        ):
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
            if _chunks_do_not_fit(config, vpp, mbsz):
                rejected[_REASONS["vpp"]] += weight
            elif reason := _reason(
                config.model_copy(update={"mbsz": mbsz, "vpp": vpp, "ep": ep, "etp": etp})
            ):
                rejected[reason] += weight
            else:
                sizes.append(mbsz)
    return Family(config, experts, batches)


def _chunks_do_not_fit(config: Config, vpp: int | None, mbsz: int) -> bool:
    """What check_config says of VPP, for the many that fail."""
    return vpp is not None and (
        config.pp == 1
        or any(n % vpp for n in config.stage_layers)
        or bool(config.num_microbatches // mbsz % config.pp)
    )


def stage_splits(config: Config, num_stages: int) -> tuple[dict[str, Any], ...]:
    """Ways to deal out the layers that are worth a try, as settings; no settings are even stages.

    Where the vocabulary is large the embedding and the output layer count as a layer each: 106 layers over 12
    stages are 8, ten times 9, and 8. Where the output layer costs as much as several layers, the last stage
    has as many fewer.
    """
    if num_stages == 1:
        return ({},)
    weight, is_even = vocabulary_weight(config), config.num_layers % num_stages == 0
    splits = [split_layers(config.num_layers, num_stages)]
    if weight >= _LARGE_VOCABULARY:
        splits.append(split_layers(config.num_layers, num_stages, count_ends=True))
    if round(weight) > 1:
        splits.append(_light_last_stage(config.num_layers, num_stages, round(weight)))
    texts = dict.fromkeys(stages_text(split) for split in splits if min(split) >= 0 and all(split[1:-1]))
    return tuple({} if is_even and "," not in text else {"pipeline_layers": text} for text in texts) or ({},)


def vocabulary_weight(config: Config) -> float:
    """How many layers the output layer's product is worth: its weights by those that a token meets in a
    layer.
    """
    count = count_parameters(config)
    tables = 1 if config.tie_embeddings else 2
    layer = (count.active_per_token - count.embedding) / config.num_layers
    return count.embedding / tables / layer


def _light_last_stage(num_layers: int, num_stages: int, output_layers: int) -> list[int]:
    """A split in which the output layer counts as so many layers, and the embedding as one."""
    last = max(0, round((num_layers + 1 + output_layers) / num_stages) - output_layers)
    first, *others = split_layers(num_layers - last + 1, num_stages - 1)
    return [first - 1, *others, last]


def notes(config: Config) -> list[str]:
    """What is allowed but costs: words for a table."""
    if config.use_moe and config.etp * config.ep > config.gpus_per_node:
        return ["experts over nodes"]
    return []
