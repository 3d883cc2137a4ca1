"""A comparison: its options and runs, the state in its folder, and the results of its runs. No torch.

$RUN_DIR/NAME/
  VARIANT/            run folder; VARIANT_seed_1235 for another seed
  logs/VARIANT.log    output of the launcher
  compare.json        settings and, with --match time, the measured seconds per iteration
  report.md report.html results.json
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from moe_exp.config import ConfigError, load_config, problem, raise_for
from moe_exp.host.files import read_json, write_json
from moe_exp.report.comparison import NATS, TRAINING, Overview, run_curve, window_of
from moe_exp.report.headline import Axis
from moe_exp.report.run_data import RunRecords, read_run
from moe_exp.studies.child_runs import Case, given_settings
from moe_exp.studies.compare.variants import Match, Variant, make_variants, match_sizes, reference_of


@dataclass(frozen=True)
class Options:
    """Options of a comparison besides training settings."""

    runs: str = ""  # comma-separated names, see `make_variants`
    variants: tuple[str, ...] = ()  # further ones, NAME:SETTING=VALUE,...
    match: Match = "flops"  # quantity that is equal for all variants
    repeats: int = 1  # runs per variant, each with another seed
    seconds: float = 0.0  # training time of each run with `time`; 0: that of the reference for TRAIN_ITERS
    timeout: float = 0.0  # time limit of a run (seconds); 0: none

    def problems(self) -> Iterator[str]:
        if self.match not in get_args(Match):
            fix = f"use one of {', '.join(get_args(Match))}"
            yield problem("match", self.match, "unknown quantity", fix)
        if self.repeats < 1:
            fix = "set it to the number of runs per variant"
            yield problem("repeats", self.repeats, "must be at least 1", fix)
        for name in ("seconds", "timeout"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                yield problem(name, value, "must be a number of at least 0", f"correct or omit --{name}")
        if self.seconds > 0 and self.match != "time":
            rule = f"requires --match time, not {self.match}"
            yield problem("seconds", self.seconds, rule, "add --match time")


@dataclass(frozen=True)
class Comparison:
    """Variants of matched size, and the folder of their runs."""

    options: Options
    folder: Path  # see the top of this file
    variants: tuple[Variant, ...]  # with `time`, TRAIN_ITERS is set once the speeds are known

    @classmethod
    def of(cls, options: Options, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Comparison:
        """Reads all settings and chooses the model sizes, without disk access. Raises ConfigError with all
        problems. `flags` are settings of the runs by field name; None means not given.
        """
        raise_for(options.problems())
        given = given_settings(flags, environ)
        base = load_config(given, {})
        if base.nnodes > 1:
            rule = "a comparison runs on a single node"
            raise ConfigError([problem("nnodes", base.nnodes, rule, "set NNODES=1")])
        variants = match_sizes(make_variants(options.runs, options.variants, given), options.match)
        names = [variant.name for variant in variants]
        name = base.run_name or "_".join(["compare", base.preset, options.match, *names])
        return cls(options, Path(base.run_dir).expanduser() / name, tuple(variants))

    @property
    def reference(self) -> Variant:
        """Reference variant, whose size the other variants match."""
        return reference_of(self.variants)

    @property
    def names(self) -> list[str]:
        return [variant.name for variant in self.variants]

    def runs(self) -> list[Case]:
        runs = []
        # The outer loop is over seeds, so that an interrupted comparison has complete rounds of all variants.
        for number, variant in itertools.product(range(self.options.repeats), self.variants):
            seed = variant.config.seed + number
            name = variant.name if number == 0 else f"{variant.name}_seed_{seed}"
            remote = variant.config.remote_dir and f"{variant.config.remote_dir}/{self.folder.name}"
            placed = variant.having(run_dir=str(self.folder), run_name=name, seed=seed, remote_dir=remote)
            log = self.folder / "logs" / f"{name}.log"
            runs.append(Case(name, placed.flags, placed.config, log, variant=variant.name))
        return runs

    def paced(self, seconds: Mapping[str, float]) -> Comparison:
        """Returns the comparison with equal training times. `seconds`: seconds per iteration, by variant."""
        budget = self.options.seconds or self.reference.config.train_iters * seconds[self.reference.name]
        paced = (one.lasting(max(1, round(budget / seconds[one.name]))) for one in self.variants)
        return replace(self, variants=tuple(paced))

    def known_pace(self) -> dict[str, float]:
        """Returns the seconds per iteration that earlier `moe-exp compare` calls measured, by variant."""
        before = self._kept().get("variants", {})
        paces = {name: entry.get("seconds_per_iteration") for name, entry in before.items()}
        return {name: seconds for name, seconds in paces.items() if seconds}

    def keep(self, pace: Mapping[str, float]) -> None:
        """Writes compare.json; variants from earlier `moe-exp compare` calls stay in it."""
        entries = self._kept().get("variants", {})
        for variant in self.variants:
            seconds = pace.get(variant.name)
            entries[variant.name] = {"settings": variant.compared, "seconds_per_iteration": seconds}
        options = {"match": self.options.match, "seconds": self.options.seconds}
        write_json(self.folder / "compare.json", {**options, "variants": entries})

    def compare_with_before(self) -> None:
        """Raises ConfigError if earlier runs had other settings. Must be called before `paced`."""
        if not (kept := self._kept()):
            return
        fix, problems = "restore the old value, or use another RUN_NAME", []
        for name, value in (("match", self.options.match), ("seconds", self.options.seconds)):
            if kept.get(name) != value:
                rule = f"must not change; {self.folder} was started with {kept.get(name)}"
                problems.append(problem(name, value, rule, fix))
        for variant in self.variants:
            before = kept["variants"].get(variant.name, {}).get("settings", {})
            for name, value in variant.compared.items():
                if name in before and before[name] != value:
                    rule = f"must not change; {variant.name} in {self.folder} was started with {before[name]}"
                    problems.append(problem(name, value, rule, fix))
        raise_for(problems)

    def _kept(self) -> dict[str, Any]:
        """Returns the content of compare.json, or {} if it does not exist."""
        path = self.folder / "compare.json"
        if not path.exists():
            return {}
        fix = "delete this file; the comparison is then rebuilt from the results in its folder"
        kept = read_json(path, fix=fix)
        if not isinstance(kept, dict) or not isinstance(kept.get("variants"), dict):
            raise ValueError(f"{path}: invalid content. Fix: {fix}.")
        return kept


# Results


@dataclass(frozen=True)
class Ended:
    """Outcome of a run of the comparison."""

    run: Case
    status: str  # finished, stopped, failed, oom (out of memory), timeout, or left (not started)
    recorded: RunRecords  # contents of its folder
    numbers: Overview  # as on the report page; NaN if not measured
    reason: str = ""  # why it failed

    @property
    def final_loss(self) -> float | None:
        """Mean training loss over the last 5% of the run's tokens, in nats per token; None if not finite."""
        return self.numbers.final_loss if math.isfinite(self.numbers.final_loss) else None

    @property
    def validated_loss(self) -> float | None:
        """Validation loss after the last iteration, in nats per token; None if not measured at that time."""
        table = self.recorded.valid
        if not len(table["iteration"]) or table["iteration"][-1] < self.run.config.train_iters:
            return None
        return float(table["lm_loss"][-1])


def is_finished(run: Case) -> bool:
    """Whether the run was trained to its end, according to its summary."""
    summary = _summary(run)
    return summary.get("status") == "finished" and summary.get("iteration", 0) >= run.config.train_iters


def read_ended(run: Case, *, status: str = "", reason: str = "") -> Ended:
    """Reads a run's state from its folder. `status`, `reason`: why the run did not finish, if known."""
    recorded = read_run(run.folder.path)
    numbers = Overview(recorded, float("nan"), None, 0.0)
    return Ended(run, status or str(_summary(run).get("status") or "left"), recorded, numbers, reason)


def _summary(run: Case) -> dict[str, Any]:
    try:
        return dict(read_json(run.folder.summary))
    except (OSError, ValueError):
        return {}


def losses_at_shared_end(ended: Sequence[Ended], axis: Axis) -> tuple[float, list[float | None]] | None:
    """Returns the position on `axis` where the shortest run ends, and each run's smoothed loss there. A loss
    is interpolated linearly; None if unknown. Returns None if fewer than two runs can be compared.
    """
    # All runs use the same window in tokens: a shorter one would only cover later, lower losses.
    window = window_of([one.recorded for one in ended])
    curves = {}
    for index, one in enumerate(ended):
        if curve := run_curve(one.recorded, TRAINING, NATS, window):
            known = np.isfinite(curve.at[axis])
            if known.any():
                curves[index] = curve.at[axis][known], curve.loss[known]
    if len(curves) < 2:
        return None
    end = min(float(x[-1]) for x, _ in curves.values())
    values = {index: float(np.interp(end, x, loss, left=np.nan)) for index, (x, loss) in curves.items()}
    return end, [values.get(index) for index in range(len(ended))]
