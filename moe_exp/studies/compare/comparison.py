"""A comparison: options, runs, and what its folder says of earlier calls. No torch.

$RUN_DIR/NAME/
  VARIANT/            its run folder; VARIANT_seed_1235 for another seed
  logs/VARIANT.log    output of its launcher
  compare.json        settings, and with --match time the measured seconds per iteration
  report.md report.html results.json
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_exp.config import TRAITS, ConfigError, load_config, problem
from moe_exp.host.files import read_json, write_json
from moe_exp.studies.child_runs import Case, given_settings
from moe_exp.studies.compare.variants import (
    MATCHES,
    Match,
    Variant,
    make_variants,
    match_sizes,
    reference_of,
    with_iterations,
)


@dataclass(frozen=True)
class Options:
    """Options of a comparison besides training settings."""

    runs: str = ""  # comma-separated names, see `make_variants`
    variants: tuple[str, ...] = ()  # others, NAME:SETTING=VALUE,...
    match: Match = "flops"  # what is equal for all
    repeats: int = 1  # runs per variant, each with another seed
    seconds: float = 0.0  # with `time`, training time of each; 0: as long as the reference for TRAIN_ITERS
    timeout: float = 0.0  # seconds after which a run is ended; 0: never

    def problems(self) -> list[str]:
        found = []

        def refuse(name: str, rule: str, fix: str) -> None:
            found.append(problem(name, getattr(self, name), rule, fix))

        if self.match not in MATCHES:
            refuse("match", "is nothing to match by", f"use one of {', '.join(MATCHES)}")
        if self.repeats < 1:
            refuse("repeats", "must be at least 1", "give the number of runs of each variant")
        for name in ("seconds", "timeout"):
            if not 0 <= getattr(self, name) < math.inf:
                refuse(name, "must be a number from 0 on", "leave it out for none")
        if self.seconds > 0 and self.match != "time":
            refuse("seconds", f"is a budget of time, but --match is {self.match}", "add --match time")
        return found


@dataclass(frozen=True)
class Comparison:
    """Variants of matched size, and where their runs are kept."""

    options: Options
    folder: Path  # see the top of this file
    variants: tuple[Variant, ...]  # in order; with `time`, TRAIN_ITERS is set once the pace is known

    @classmethod
    def of(cls, options: Options, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Comparison:
        """Reads all settings and chooses the sizes, without touching the disk; ConfigError with all problems.
        `flags`: settings of the runs, by field name; None counts as not given.
        """
        if problems := options.problems():
            raise ConfigError(problems)
        given = given_settings(flags, environ)
        base = load_config(given, {})
        if base.nnodes > 1:
            rule = "runs are started on this node alone"
            raise ConfigError([problem("nnodes", base.nnodes, rule, "set NNODES=1")])
        variants = match_sizes(make_variants(options.runs, options.variants, given), options.match)
        names = [variant.name for variant in variants]
        name = base.run_name or "_".join(["compare", base.preset, options.match, *names])
        return cls(options, Path(base.run_dir).expanduser() / name, tuple(variants))

    @property
    def reference(self) -> Variant:
        """The variant whose size the others match."""
        return reference_of(self.variants)

    @property
    def names(self) -> list[str]:
        return [variant.name for variant in self.variants]

    def runs(self) -> list[Case]:
        """All runs: every variant with one seed, then with the next, so that each round is complete."""
        return [self._run(one, number) for number in range(self.options.repeats) for one in self.variants]

    def _run(self, variant: Variant, number: int) -> Case:
        seed = variant.config.seed + number
        name = variant.name if number == 0 else f"{variant.name}_seed_{seed}"
        remote = variant.config.remote_dir and f"{variant.config.remote_dir}/{self.folder.name}"
        placed = variant.having(run_dir=str(self.folder), run_name=name, seed=seed, remote_dir=remote)
        log = self.folder / "logs" / f"{name}.log"
        return Case(name, placed.flags, placed.config, log, variant=variant.name)

    def paced(self, seconds: Mapping[str, float]) -> Comparison:
        """The comparison with equal training time for all, given seconds per iteration by variant name."""
        budget = self.options.seconds or self.reference.config.train_iters * seconds[self.reference.name]
        counts = [max(1, round(budget / seconds[one.name])) for one in self.variants]
        chosen = [with_iterations(*pair) for pair in zip(self.variants, counts, strict=True)]
        return replace(self, variants=tuple(chosen))


def known_pace(comparison: Comparison) -> dict[str, float]:
    """Seconds per iteration by variant name, as measured by earlier calls."""
    paces = {name: entry.get("seconds_per_iteration") for name, entry in _kept(comparison).items()}
    return {name: seconds for name, seconds in paces.items() if seconds}


def keep(comparison: Comparison, pace: Mapping[str, float]) -> None:
    """Writes compare.json, keeping variants of earlier calls."""
    entries = _kept(comparison)
    for variant in comparison.variants:
        seconds = pace.get(variant.name)
        entries[variant.name] = {"settings": _settings(variant), "seconds_per_iteration": seconds}
    options = {"match": comparison.options.match, "seconds": comparison.options.seconds}
    write_json(comparison.folder / "compare.json", {**options, "variants": entries})


def compare_with_before(comparison: Comparison) -> None:
    """ConfigError, a line per setting, if the folder's runs were started with others; call before `paced`."""
    path = comparison.folder / "compare.json"
    if not path.exists():
        return
    kept, options = _read(path), comparison.options
    fix = "set it as it was, or give another RUN_NAME"
    problems = [
        problem(name, value, f"{comparison.folder} was made with {kept.get(name)}", fix)
        for name, value in {"match": options.match, "seconds": options.seconds}.items()
        if kept.get(name) != value
    ]
    for variant in comparison.variants:
        before = kept["variants"].get(variant.name, {}).get("settings", {})
        problems += [
            problem(name, value, f"{comparison.folder} holds a {variant.name} with {before[name]}", fix)
            for name, value in _settings(variant).items()
            if name in before and before[name] != value
        ]
    if problems:
        raise ConfigError(problems)


def _settings(variant: Variant) -> dict[str, Any]:
    return {name: value for name, value in variant.config.model_dump().items() if TRAITS[name].compared}


def _kept(comparison: Comparison) -> dict[str, Any]:
    path = comparison.folder / "compare.json"
    return dict(_read(path)["variants"]) if path.exists() else {}


def _read(path: Path) -> dict[str, Any]:
    fix = "delete it; the comparison is then rebuilt from the results in its folder"
    kept = read_json(path, fix=fix)
    if not isinstance(kept, dict) or not isinstance(kept.get("variants"), dict):
        raise ValueError(f"{path}: does not describe a comparison. Fix: {fix}.")
    return kept
