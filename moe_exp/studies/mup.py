"""For `moe-exp mup`: resizes models, computes how outputs grow with size, and finds best learning rates.
Does not import torch: the caller passes the training function.
"""

import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from moe_exp.config import Config, ConfigError, problem, raise_for
from moe_exp.host.files import read_json, write_json
from moe_exp.host.progress import progress

LARGEST_SLOPE = 0.1
LARGEST_MOVE = 1.5
_WITH_WIDTH = (
    "num_heads", "num_query_groups", "ffn_hidden_size", "moe_ffn_hidden_size", "shared_expert_size",
)  # fmt: skip


def resized(base: Config, *, width: int, num_experts: int = 0, granularity: int = 1) -> Config:
    """Returns `base` with HIDDEN_SIZE=`width`; heads and MLP widths change in proportion. `num_experts` is
    the new number of experts (0: as in `base`). Each of these is then split into `granularity` experts, and
    TOPK is multiplied by `granularity`. Raises ConfigError if the resized model is invalid.
    """
    ratio = Fraction(width, base.hidden_size)
    sizes = {name: getattr(base, name) * ratio for name in _WITH_WIDTH}
    sizes["moe_ffn_hidden_size"] = base.expert_ffn_size * ratio / granularity
    for name, size in sizes.items():
        if size.denominator != 1:
            rule = f"must remain a whole number, but is {size} at HIDDEN_SIZE={width}"
            raise ConfigError([problem(name, getattr(base, name), rule, "choose other widths")])
    changes: dict[str, Any] = {name: int(size) for name, size in sizes.items()}
    changes |= {"hidden_size": width, "head_dim": base.kv_channels, "topk": base.topk * granularity}
    changes["num_experts"] = (num_experts or base.num_experts) * granularity
    # The base model of muP is the one given in the settings, else `base` itself.
    changes["mup_base_hidden_size"] = base_width = base.mup_base_hidden_size or base.hidden_size
    in_proportion = base.expert_ffn_size * base_width // base.hidden_size
    changes["mup_base_moe_ffn_hidden_size"] = base.mup_base_moe_ffn_hidden_size or in_proportion
    changes["mup_base_topk"] = base.mup_base_topk or base.topk
    config = base.model_copy(update=changes)
    raise_for(config.problems())
    return config


def models_of_axes(
    base: Config, widths: Sequence[int], experts: Sequence[int], parts: Sequence[int]
) -> dict[str, dict[int, Config]]:
    """Returns models of each axis (such as width) by size. Raises ConfigError if no axis has two models."""
    if base.world_size > 1:
        rule, fix = "models are trained on one rank", "set GPUS_PER_NODE=1 and NNODES=1"
        raise ConfigError([problem("gpus_per_node", base.gpus_per_node, rule, fix)])
    axes = {
        "width": {width: resized(base, width=width) for width in widths},
        # The other axes use the first width, so that each axis varies one size only.
        "experts": {number: resized(base, width=widths[0], num_experts=number) for number in experts},
        "granularity": {number: resized(base, width=widths[0], granularity=number) for number in parts},
    }
    axes = {axis: models for axis, models in axes.items() if len(models) > 1}
    if not axes:
        rule, fix = "a comparison requires at least two models", "set at least two widths, or --experts"
        raise ConfigError([problem("widths", ",".join(map(str, widths)), rule, fix)])
    return axes


# Coordinate check


@dataclass(frozen=True)
class Growth:
    """Growth of a module's outputs with model size: slopes of log2(output) against log2(size)."""

    part: str
    initial: float  # slope of the outputs' mean absolute value before training
    change: float  # slope of their mean absolute change during training

    @property
    def is_flat(self) -> bool:
        # The output layer's initial weights shrink with the width by n^-1, not n^(-1/2), so its initial
        # outputs may shrink as well.
        initial = max(0.0, self.initial) if self.part == "output layer" else self.initial
        return max(abs(initial), abs(self.change)) <= LARGEST_SLOPE


def growths(measured: Mapping[int, Sequence[Sequence[Mapping[str, tuple[float, float]]]]]) -> list[Growth]:
    """Returns how two values of each module grow with size: output before training, and change in training.
    `measured[size][run][step][module]`: (mean output, mean change); each size has one run per seed.
    """
    sizes, found = np.log2(list(measured)), []

    def slope(outputs: Sequence[float]) -> float:
        return float(np.polyfit(sizes, np.log2(np.maximum(outputs, 1e-30)), 1)[0])

    for part in next(iter(measured.values()))[0][0]:
        initial = [fmean(run[0][part][0] for run in runs) for runs in measured.values()]
        change = [fmean(run[-1][part][1] for run in runs) for runs in measured.values()]
        found.append(Growth(part, slope(initial), slope(change)))
    return found


# Transfer of the learning rate


@dataclass(frozen=True)
class Optimum:
    """The best learning rate of a model."""

    name: str  # of the model
    rate: float  # geometric mean over seeds
    factor: float  # standard deviation over seeds, as a factor on the rate
    at_edge: bool  # whether it is the smallest or largest tried, so the true optimum may be outside


def best_rate(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, bool]:
    """Fits a parabola to `losses`; returns log2 of the best rate, and whether it is at an end of `rates`."""
    logs = np.log2(rates)
    place = int(np.argmin(losses))
    if place in (0, len(rates) - 1):
        return float(logs[place]), True
    below, above = logs[place] - logs[place - 1], logs[place + 1] - logs[place]
    fall, rise = (losses[place] - losses[place - 1]) / below, (losses[place + 1] - losses[place]) / above
    if not (math.isfinite(rise) and math.isfinite(fall)) or rise <= fall:
        return float(logs[place]), False
    # Minimum of the parabola through the lowest loss and its neighbors: its derivative goes linearly from
    # `fall` to `rise` between the midpoints of the two intervals.
    share = -fall / (rise - fall)
    return float(logs[place] - below / 2 + share * (below + above) / 2), False


def optimum(name: str, rates: Sequence[float], losses_by_seed: Sequence[Sequence[float]]) -> Optimum:
    """A model's best learning rate. `losses_by_seed`: one loss per seed and rate; inf if the run diverged."""
    logs, at_edges = zip(*(best_rate(rates, losses) for losses in losses_by_seed), strict=True)
    factor = 2.0 ** stdev(logs) if len(logs) > 1 else 1.0
    return Optimum(name, 2.0 ** fmean(logs), factor, any(at_edges))


def moved(optima: Sequence[Optimum]) -> float:
    """Returns the ratio of the largest to the smallest best learning rate."""
    rates = [one.rate for one in optima]
    return max(rates) / min(rates)


def seeds(config: Config, repeats: int) -> Iterator[Config]:
    for number in range(repeats):
        yield config.model_copy(update={"seed": config.seed + number})


def run_key(config: Config, rate: float, seed: int) -> str:
    experts = f"{config.num_experts} experts of {config.expert_ffn_size}, top-{config.topk}"
    return f"width {config.hidden_size}, {experts}, LR {rate:.6g}, seed {seed}"


def losses_of(
    models: Sequence[Config], rates: Sequence[float], repeats: int, folder: Path,
    train: Callable[[Config], float], num_workers: int,
) -> dict[str, float]:  # fmt: skip
    """Trains each model with each rate and seed, and returns losses by `run_key` (inf if diverged).

    Calls `train` in worker processes. Skips runs whose losses are in folder/losses.json; ConfigError if that
    file belongs to other models.
    """
    settings = models[0].model_dump(mode="json", exclude={"lr", "num_experts", "topk"})
    path, known = folder / "losses.json", {}
    if path.exists():
        before = read_json(path)
        there = before.get("settings") if isinstance(before, dict) else None
        if there != settings:
            there = there if isinstance(there, dict) else {}
            names = [name for name, value in settings.items() if there.get(name) != value]
            rule = f"contains runs with another {(names or ['model'])[0].upper()}"
            raise ConfigError([problem("out", str(folder), rule, "use another folder")])
        known = before["losses"]
    jobs = {}
    for model, rate in itertools.product(models, rates):
        for seed, config in enumerate(seeds(model, repeats)):
            # MIN_LR is scaled with LR.
            floor = config.min_lr / config.lr if config.lr else 0.0
            job = config.model_copy(update={"lr": rate, "min_lr": rate * floor})
            jobs[run_key(model, rate, seed)] = job
    left = {key: job for key, job in jobs.items() if key not in known}
    with (
        progress("training", len(jobs), unit="models", done=len(jobs) - len(left)) as advance,
        ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn")) as pool,
    ):
        for key, loss in zip(left, pool.map(train, left.values()), strict=True):
            known[key] = loss if math.isfinite(loss) else None  # diverged
            write_json(path, {"settings": settings, "losses": known})
            advance(1, key)
    return {key: math.inf if known[key] is None else float(known[key]) for key in jobs}


def draw_transfer(
    path: Path, title: str, rates: Sequence[float], losses: Mapping[str, Sequence[Sequence[float]]]
) -> None:
    """Saves a PNG of loss against learning rate. A line shows a model's mean over seeds, a band the range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for name, by_seed in losses.items():
        table = np.where(np.isfinite(by_seed), by_seed, np.nan)
        means = table.mean(axis=0)
        (line,) = axes.plot(rates, means, marker="o", label=name)
        axes.fill_between(rates, table.min(axis=0), table.max(axis=0), color=line.get_color(), alpha=0.15)
        if np.isfinite(means).any():
            best = int(np.nanargmin(means))
            axes.plot(rates[best], means[best], marker="*", markersize=14, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xlabel("LR")
    axes.set_ylabel("final training loss (nats per token)")
    axes.legend()
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    figure.savefig(path, format="png")
