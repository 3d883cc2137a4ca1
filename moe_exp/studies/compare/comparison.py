"""A comparison: what was asked for, its runs, and what its folder says of the call before. No torch.

$RUN_DIR/NAME/
  VARIANT/            its run folder; VARIANT_seed_1235 for another seed
  logs/VARIANT.log    what its launcher has printed
  compare.json        settings, and with --match time the seconds per iteration that were measured
  report.md report.html
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError, load_config, problem
from moe_exp.host.files import write_json
from moe_exp.runs.run_folder import RunFolder
from moe_exp.studies.child_runs import given_settings
from moe_exp.studies.compare.matching import MATCHES, Match, iterations_of_time, match_sizes, with_iterations
from moe_exp.studies.compare.variants import Variant, make_variants, reference_of

# Settings that may change between two calls: what no loss depends on.
_FREE = {
    "run_dir",
    "run_name",
    "master_addr",
    "master_port",
    "num_workers",
    "wandb_project",
    "wandb_mode",
    "keep_last",
    "keep_every",
}


@dataclass(frozen=True)
class Options:
    """What a comparison has besides settings of training.

    Attributes:
        runs: names with commas, see `make_variants`.
        variants: others, NAME:SETTING=VALUE,...
        match: what is the same for all.
        repeats: runs of every variant, each with another seed.
        seconds: with `time`, how long each is trained; 0: as long as the reference takes for TRAIN_ITERS.
        timeout: seconds after which a run is ended; 0: never.
    """

    runs: str = ""
    variants: tuple[str, ...] = ()
    match: Match = "flops"
    repeats: int = 1
    seconds: float = 0.0
    timeout: float = 0.0

    @classmethod
    def of(cls, texts: Mapping[str, str], variants: Sequence[str]) -> Options:
        """Reads options as they are written.

        Args:
            texts: by field name, but for the variants.
            variants: of --variant.

        Raises:
            ConfigError: a number that is none.
        """
        values: dict[str, Any] = dict(texts)
        problems = []
        for name, kind, what in (
            ("repeats", int, "a whole number"),
            ("seconds", float, "a number"),
            ("timeout", float, "a number"),
        ):
            try:
                values[name] = kind(texts[name])
            except ValueError:
                problems.append(
                    problem(name, texts[name], f"must be {what}", f"give {what}, or leave --{name} out")
                )
        if problems:
            raise ConfigError(problems)
        return cls(variants=tuple(variants), **values)

    def problems(self) -> list[str]:
        """What is wrong with them by themselves."""
        found = []
        if self.match not in MATCHES:
            found.append(
                problem("match", self.match, "is nothing to match by", f"use one of {', '.join(MATCHES)}")
            )
        if self.repeats < 1:
            found.append(
                problem(
                    "repeats", self.repeats, "must be at least 1", "give the number of runs of each variant"
                )
            )
        for name in ("seconds", "timeout"):
            if not 0 <= getattr(self, name) < math.inf:
                found.append(
                    problem(name, getattr(self, name), "must be a number from 0 on", "leave it out for none")
                )
        if self.seconds > 0 and self.match != "time":
            found.append(
                problem(
                    "seconds",
                    self.seconds,
                    f"is a budget of time, but --match is {self.match}",
                    "add --match time",
                )
            )
        return found


@dataclass(frozen=True)
class Run:
    """One run of a variant: its seed's, in a folder of its own."""

    name: str
    variant: Variant
    folder: RunFolder
    log: Path

    @property
    def config(self) -> Config:
        return self.variant.config


@dataclass(frozen=True)
class Comparison:
    """Variants whose sizes match, and where their runs are kept.

    Attributes:
        options: as asked for.
        folder: see the top of this file.
        variants: with their sizes, in order; with `time` their TRAIN_ITERS are not chosen before the pace is
            known.
    """

    options: Options
    folder: Path
    variants: tuple[Variant, ...]

    @classmethod
    def of(cls, options: Options, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Comparison:
        """Reads all settings and chooses the sizes. Touches no disk.

        Args:
            options: of the comparison.
            flags: settings of the runs, by field name; None counts as not given.
            environ: the environment.

        Raises:
            ConfigError: with everything that is wrong in it.
        """
        problems = options.problems()
        if problems:
            raise ConfigError(problems)
        given = given_settings(flags, environ)
        base = load_config(given, {})
        if base.nnodes > 1:
            raise ConfigError(
                [problem("nnodes", base.nnodes, "runs are started on this node alone", "set NNODES=1")]
            )
        variants = match_sizes(make_variants(options.runs, options.variants, given), options.match)
        name = base.run_name or "_".join(
            ["compare", base.preset, options.match, *(variant.name for variant in variants)]
        )
        return cls(options, Path(base.run_dir).expanduser() / name, tuple(variants))

    @property
    def reference(self) -> Variant:
        """The variant that gives the others their size."""
        return reference_of(self.variants)

    @property
    def names(self) -> list[str]:
        return [variant.name for variant in self.variants]

    def runs(self) -> list[Run]:
        """All runs: every variant with one seed, then with the next, so that each round is a comparison by
        itself.
        """
        return [
            self._run(variant, number) for number in range(self.options.repeats) for variant in self.variants
        ]

    def _run(self, variant: Variant, number: int) -> Run:
        seed = variant.config.seed + number
        name = variant.name if number == 0 else f"{variant.name}_seed_{seed}"
        placed = variant.having(run_dir=str(self.folder), run_name=name, seed=seed)
        return Run(name, placed, RunFolder(self.folder / name), self.folder / "logs" / f"{name}.log")

    def paced(self, seconds: Mapping[str, float]) -> Comparison:
        """The comparison with the iterations that take every variant the same time.

        Args:
            seconds: per iteration, by the variant's name.
        """
        budget = self.options.seconds or self.reference.config.train_iters * seconds[self.reference.name]
        chosen = [
            with_iterations(one, iterations_of_time(budget, seconds[one.name])) for one in self.variants
        ]
        return replace(self, variants=tuple(chosen))


def known_pace(comparison: Comparison) -> dict[str, float]:
    """Seconds per iteration that an earlier call has measured, by the variant's name."""
    return {
        name: entry["seconds_per_iteration"]
        for name, entry in _kept(comparison).items()
        if entry.get("seconds_per_iteration")
    }


def keep(comparison: Comparison, pace: Mapping[str, float]) -> None:
    """Writes compare.json; variants of earlier calls stay in it."""
    entries = _kept(comparison)
    for variant in comparison.variants:
        entries[variant.name] = {
            "settings": _settings(variant),
            "seconds_per_iteration": pace.get(variant.name),
        }
    options = {"match": comparison.options.match, "seconds": comparison.options.seconds}
    write_json(comparison.folder / "compare.json", {**options, "variants": entries})


def compare_with_before(comparison: Comparison) -> None:
    """Whether the folder's runs were started with these settings.

    Args:
        comparison: before its iterations are chosen by time.

    Raises:
        ConfigError: with a line for every setting that differs.
    """
    path = comparison.folder / "compare.json"
    if not path.exists():
        return
    kept = _read(path)
    fix = "set it as it was, or give another RUN_NAME"
    problems = [
        problem(
            name,
            getattr(comparison.options, name),
            f"{comparison.folder} was made with {kept.get(name)}",
            fix,
        )
        for name in ("match", "seconds")
        if kept.get(name) != getattr(comparison.options, name)
    ]
    for variant in comparison.variants:
        before = kept["variants"].get(variant.name, {}).get("settings", {})
        changed = {
            name: value
            for name, value in _settings(variant).items()
            if name in before and before[name] != value
        }
        where = f"{comparison.folder} holds a {variant.name} with"
        problems += [problem(name, value, f"{where} {before[name]}", fix) for name, value in changed.items()]
    if problems:
        raise ConfigError(problems)


def _settings(variant: Variant) -> dict[str, Any]:
    return {name: value for name, value in variant.config.model_dump().items() if name not in _FREE}


def _kept(comparison: Comparison) -> dict[str, Any]:
    path = comparison.folder / "compare.json"
    return dict(_read(path)["variants"]) if path.exists() else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept["variants"], dict):
            return dict(kept)
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"{path}: cannot be read. Fix: remove it, and the comparison is made anew with what its folder holds."
    )
