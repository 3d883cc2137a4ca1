"""A ladder: the same variants at several sizes (rungs). The variants of a rung have equal FLOPs per token.
Does not import torch.

$RUN_DIR/NAME/
  rung_1/ rung_2/ ...   comparisons, see studies/compare/comparison.py
  ladder.json           definition and results
  prediction_4.json     losses of the last rung (here the fourth), predicted before it ran
  report.md report.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from moe_exp.config import Config, ConfigError, load_config, problem, raise_for
from moe_exp.config.loading import given_values
from moe_exp.config.parsers import POINTS
from moe_exp.host.devices import Nodes
from moe_exp.host.files import read_yaml
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.params import count_parameters
from moe_exp.studies.child_runs import given_settings
from moe_exp.studies.compare.comparison import Comparison, Options
from moe_exp.studies.compare.variants import Variant, apart

PUBLISHED = Path(__file__).parents[1] / "ladders"

RULE = (
    "depth, MLP widths and heads in proportion to the width; tokens and warm-up in proportion to active"
    " parameters without embeddings; LR and MIN_LR in proportion to 1 / sqrt(width) (constant with"
    " PARAMETRIZATION=mup)"
)


@dataclass(frozen=True)
class Definition:
    """Models and sizes of a ladder; a ladder's YAML file has the same fields."""

    name: str = ""  # part of the default RUN_NAME (default: the file's name)
    about: str = ""  # the claim that the ladder tests, and its source
    settings: dict[str, Any] = field(default_factory=dict)  # training settings of all runs, by name
    runs: str = ""  # comma-separated names, see `make_variants`
    variants: tuple[str, ...] = ()  # further ones, NAME:SETTING=VALUE,...
    baseline: str = ""  # variant that the others are compared with (default: dense, or the first)
    rungs: tuple[dict[str, Any], ...] = ()  # settings of each rung, by name
    sizes: tuple[int, ...] = ()  # alternative to `rungs`: HIDDEN_SIZE of each rung, scaled by RULE
    repeats: int = 3  # runs per variant and rung
    asymptote: float | None = None  # E of the laws (nats per token); None: fitted

    @classmethod
    def read(cls, name: str) -> Definition:
        """Reads this package's definition `name`, or else the YAML file `name`; ConfigError if invalid."""
        own = {path.stem: path for path in sorted(PUBLISHED.glob("*.yaml"))}
        path = own.get(name, Path(name))
        if not path.is_file():
            fix = f"use a YAML file, or one of {', '.join(own)}"
            raise ConfigError([problem("definition", name, "not found", fix)])
        values = read_yaml(path, fix="correct it")
        known = [one.name for one in fields(cls)]
        if not isinstance(values, dict) or not set(values) <= set(known):
            odd = ", ".join(map(str, set(values) - set(known))) if isinstance(values, dict) else ""
            rule = f"unknown fields {odd}" if odd else "must be a mapping of fields"
            raise ConfigError([problem("definition", path, rule, f"use {', '.join(known)}")])
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return TypeAdapter(cls).validate_python({"name": path.stem, **given})
        except ValidationError as error:
            wrong = {str(one["loc"][0]): one["msg"].replace("Input should", "must") for one in error.errors()}
            rules = ((name, given[name], f"{rule} in {path}", "correct it") for name, rule in wrong.items())
            raise ConfigError([problem(*line) for line in rules]) from None

    def problems(self) -> Iterator[str]:
        number = len(self.rungs or self.sizes)
        if self.rungs and self.sizes:
            yield problem("sizes", self.sizes, "cannot be combined with rungs", "omit sizes or rungs")
        elif not number:
            yield problem("sizes", "", "a ladder requires sizes", "set --sizes, such as 16,24,32,48")
        elif number < 2:
            fix = "add larger sizes; four sizes are enough for laws and a prediction"
            yield problem("sizes", number, "a ladder requires at least two sizes", fix)
        if any(size < 1 for size in self.sizes):
            yield problem("sizes", self.sizes, "must be widths above 0 (each a HIDDEN_SIZE)", "correct them")
        for name in sorted(name for name in self.settings if name.lower() not in Config.model_fields):
            fix = "correct it in the definition's settings"
            yield problem(name, self.settings[name], "unknown setting", fix)
        if self.asymptote is not None and not 0 <= self.asymptote < math.inf:
            rule = "must be a loss of at least 0 (nats per token)"
            yield problem("asymptote", self.asymptote, rule, "omit it to fit the asymptote")


@dataclass(frozen=True)
class Ladder:
    """The comparisons of a ladder, one per rung, in ascending order of compute."""

    definition: Definition
    folder: Path
    rungs: tuple[Comparison, ...]
    baseline: str

    @classmethod
    def of(
        cls, definition: Definition, flags: Mapping[str, Any], environ: Mapping[str, str],
        timeout: float = 0.0, *, executor: str = "local",
    ) -> Ladder:  # fmt: skip
        """Reads all settings and chooses the sizes without touching the disk; ConfigError lists all problems.

        Args:
            flags: run settings by field name; the value None means that a setting is not given.
            timeout: time limit of a run in seconds; 0: no limit.
            executor: local or slurm. With slurm, PRESET=cpu (the default without TRAIN_DATA) uses CPU nodes.
        """
        raise_for(definition.problems())
        own = {name.upper(): str(value) for name, value in definition.settings.items()}
        given = given_values(flags, own | {name: value for name, value in environ.items() if value})
        on_cpus = given.get("preset", "" if given.get("train_data") else "cpu") == "cpu"
        nodes = Nodes(gpus=0 if on_cpus else None) if executor == "slurm" else None
        given = given_settings(given, {}, nodes)
        base = load_config(given, {})
        listed = [{name.lower(): value for name, value in rung.items()} for rung in definition.rungs]
        asked = {name for name, value in flags.items() if value is not None}
        if doubly := sorted(asked & {name for rung in listed for name in rung}):
            rule = "cannot be set, because the definition sets it for each rung"
            raise ConfigError([problem(name, flags[name], rule, "omit it") for name in doubly])
        name = base.run_name or "_".join(filter(None, ("ladder", definition.name, base.preset)))
        folder = Path(base.run_dir).expanduser() / name
        options = Options(definition.runs, definition.variants, repeats=definition.repeats, timeout=timeout)
        comparisons = []
        for number, rung in enumerate(listed or [scaled(base, width) for width in definition.sizes], start=1):
            settings = {**given, **rung}
            config = load_config(settings, {})
            if config.eval_interval and config.train_iters % config.eval_interval:
                settings["eval_interval"] = config.train_iters  # ensures validation after the last iteration
            settings |= {"run_dir": str(folder), "run_name": f"rung_{number}"}
            settings["remote_dir"] = base.remote_dir and f"{base.remote_dir}/{name}"
            comparisons.append(Comparison.of(options, settings, {}))
        variants = comparisons[0].variants
        dense = next((one.name for one in variants if not one.config.use_moe), variants[0].name)
        ladder = cls(definition, folder, tuple(comparisons), definition.baseline or dense)
        raise_for(ladder.problems())
        return ladder

    def problems(self) -> Iterator[str]:
        """Checks that the baseline exists, rungs increase in FLOPs, and variants match in FLOPs per token."""
        if self.baseline not in self.names:
            yield problem("baseline", self.baseline, "unknown variant", f"use one of {', '.join(self.names)}")
        if ramp := self.rungs[0].reference.config.rampup_batch_size:
            rule = "not supported in a ladder, whose FLOPs assume a constant batch"
            yield problem("rampup_batch_size", ramp, rule, "leave it empty")
        budgets = [compute_of(comparison.reference.config) for comparison in self.rungs]
        for number, (before, after) in enumerate(pairwise(budgets), start=2):
            if after <= before:
                rule = f"its {after:.3g} FLOPs must exceed the {before:.3g} of the previous rung"
                yield problem("rungs", f"rung {number}", rule, "list rungs in ascending order")
        for number, comparison in enumerate(self.rungs, start=1):
            reference = comparison.reference
            for variant in comparison.variants:
                share = apart(variant.config, reference.config, "flops")
                if abs(share) > 0.02:
                    rule = f"FLOPs per token differ by {share:+.1%} from {reference.name}"
                    fix = "omit the variant's MLP width, or choose a width that matches"
                    yield problem("variant", f"{variant.name} of rung {number}", rule, fix)

    def flops(self, rung: int) -> dict[str, float]:
        """Returns each variant's model FLOPs for one run at rung `rung` (counted from 0)."""
        return {one.name: compute_of(one.config) for one in self.rungs[rung].variants}

    @property
    def names(self) -> list[str]:
        return self.rungs[0].names

    @property
    def grows(self) -> bool:
        """Whether the models grow from rung to rung; if not, only the number of tokens grows."""
        first, *others = ([count_parameters(one.config) for one in rung.variants] for rung in self.rungs)
        return any(other != first for other in others)


def compute_of(config: Config) -> float:
    """Returns the model FLOPs of a whole run."""
    return flops_per_iteration(config, config.gbsz) * config.train_iters


def scaled(base: Config, width: int) -> dict[str, Any]:
    """Returns the settings of a rung: `base` scaled to HIDDEN_SIZE=`width` as described in RULE."""
    share = width / base.hidden_size

    def rounded(value: int, unit: int = 1) -> int:
        return max(unit, round(value * share / unit) * unit) if value else 0

    # Heads must form whole query groups; kernels require MLP widths in multiples of 8.
    group = max(1, base.num_heads // (base.num_query_groups or base.num_heads))
    heads = rounded(base.num_heads, group)
    shape = {"hidden_size": width, "num_layers": rounded(base.num_layers)}
    shape |= {"num_heads": heads, "num_query_groups": heads // group}
    for name in ("ffn_hidden_size", "moe_ffn_hidden_size", "shared_expert_size", "moe_latent_size"):
        shape[name] = rounded(getattr(base, name), 8)
    config = base.model_copy(update=shape)
    # Constant tokens per parameter at the same global batch size.
    iterations = max(1, round(base.train_iters * _body(config) / _body(base)))
    lengths = Variant("", {}, base.model_dump(), base).lasting(iterations).config
    rate = 1.0 if base.parametrization == "mup" else share**-0.5
    return {
        **shape,
        "lr": float(f"{base.lr * rate:.3g}"),
        "min_lr": float(f"{base.min_lr * rate:.3g}"),
        "warmup_iters": round(base.warmup_iters * iterations / base.train_iters),
        **{name: getattr(lengths, name) for name in ("train_iters", "decay_iters", "wsd_decay_iters")},
        **{name: text for name in POINTS if (text := getattr(lengths, name)) != getattr(base, name)},
    }


def _body(config: Config) -> float:
    """Counts the active parameters, excluding the embeddings and the output layer."""
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
    return count_parameters(config).active_per_token - tables
