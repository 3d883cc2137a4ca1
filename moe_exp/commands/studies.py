"""`moe-exp compare`, `ladder`, `mup` and `sweep`: studies with many runs."""

import argparse
import math
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_exp.commands.parsers import Argument, arg, command, flag, repeated, string, takes
from moe_exp.config import Config, ConfigError, add_arguments, load_config, problem, setting_error
from moe_exp.config.loading import with_file
from moe_exp.studies.sweep.settings import SweepSettings

_VARIANT = "additional model with other settings, such as fine:NUM_EXPERTS=64,TOPK=4 (repeatable)"


@command("compare", "train dense and MoE models with the same budget and write a report")
@takes(
    string("--runs", "comma-separated models: moe (capacity), dmoe (dropless), dense (default: dmoe,dense, "
           "or none if --variant is given twice or more)"),
    repeated("--variant NAME:SETTING=VALUE,...", _VARIANT),
    arg("--match", "quantity to equalize across models; flops: FLOPs per token; active-params: active "
        "parameters; time: training time (flops and active-params also equalize the "
        "number of tokens)", default="flops"),
    arg("--repeats", "runs per model, with seeds SEED, SEED+1, ..., to estimate noise", default=1),
    arg("--seconds",
        "with --match time: training time of each model (seconds; default: the time that the MoE needs for "
        "TRAIN_ITERS)",
        default=0.0),
    arg("--timeout", "time limit of each run (seconds; default: none)", default=0.0),
    flag("--dry-run", "print the models, their sizes and the expected time without starting a run"),
    add_arguments,
)  # fmt: skip
def run_compare(arguments: argparse.Namespace) -> int:
    """Trains the models one after another with the same budget and writes their final losses. The dense
    model's MLP width is chosen to match the MoE. Repeat the command to run models that are not finished.
    RUN_NAME names the comparison.
    """
    from moe_exp.studies.compare.back_to_back import check_planned_files, dry_run, run_comparison
    from moe_exp.studies.compare.comparison import Comparison, Options

    numbers = arguments.repeats, arguments.seconds, arguments.timeout
    options = Options(arguments.runs, tuple(arguments.variant), arguments.match, *numbers)
    comparison = Comparison.of(options, _flags(arguments), os.environ)
    if arguments.dry_run:
        print(dry_run(comparison), flush=True)
        check_planned_files(comparison)
        return 0
    return run_comparison(comparison)


@command(
    "ladder",
    "train dense and MoE models at several sizes, fit scaling laws and predict the loss of the largest",
)
@takes(
    arg("definition",
        "YAML file with the rungs (model sizes), or the name of a built-in ladder; optional with --sizes",
        nargs="?"),
    arg("--sizes",
        "HIDDEN_SIZE of each rung, such as 16,24,32,48; depth, tokens and LR are scaled accordingly"),
    arg("--runs", "comma-separated models: moe (capacity), dmoe (dropless), dense (default: dmoe,dense)"),
    arg("--variant NAME:SETTING=VALUE,...", _VARIANT, action="append"),
    arg("--baseline", "variant to compare the others with (default: dense)"),
    arg("--repeats", "runs per variant and rung, with seeds SEED, SEED+1, ... (default: 3)", int),
    arg("--asymptote", "irreducible loss shared by all variants (nats per token; default: fitted)", float),
    arg("--executor", "local, or slurm (one job per run); default: $EXECUTOR if set, otherwise local"),
    arg("--sbatch", "options of the SLURM jobs, such as '--partition=gpu' (default: $SBATCH)"),
    arg("--timeout", "time limit of each run (seconds; default: none)", default=0.0),
    flag("--dry-run", "print the rungs without starting or writing anything"),
    add_arguments,
)  # fmt: skip
def run_ladder(arguments: argparse.Namespace) -> int:
    """Trains variants at several sizes with equal FLOPs per rung, and fits a curve of loss versus compute
    for each variant. Reports the effective speedup over the baseline with confidence intervals. The loss
    of the last rung is predicted before that rung is trained. Repeat the command to run models that are not
    finished. RUN_NAME names the ladder.
    """
    from moe_exp.studies.ladder import climb
    from moe_exp.studies.ladder.ladder import Definition, Ladder

    name = arguments.executor or os.environ.get("EXECUTOR") or "local"
    sbatch = shlex.split(arguments.sbatch or os.environ.get("SBATCH", ""))
    if name not in climb.EXECUTORS:
        raise setting_error("executor", name, "unknown executor", f"use {' or '.join(climb.EXECUTORS)}")
    names = ("runs", "baseline", "repeats", "asymptote")
    # options override the definition, --sizes also its rungs
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    given |= {"variants": tuple(arguments.variant)} if arguments.variant else {}
    given |= {"sizes": tuple(_numbers("sizes", arguments.sizes)), "rungs": ()} if arguments.sizes else {}
    definition = Definition.read(arguments.definition) if arguments.definition else Definition()
    definition, flags = replace(definition, **given), _flags(arguments)
    ladder = Ladder.of(definition, flags, os.environ, arguments.timeout, executor=name)
    if arguments.dry_run:
        print(climb.dry_run(ladder), flush=True)
        return 0
    return climb.run_ladder(ladder, name, sbatch)


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the training settings given as flags; warns of misspelled environment variables."""
    from moe_exp.config.settings_file import warn_of_misspelt

    warn_of_misspelt()
    return {name: getattr(arguments, name) for name in ("config", *Config.model_fields)}


@command("sweep", "run a few iterations of many layouts and write a table of memory and time")
@takes(
    flag("--dry-run", "print the cases with their predicted time and memory; start and write nothing"),
    flag("--retry-failed", "also rerun cases that failed, ran out of memory or timed out"),
    lambda parser: add_arguments(parser, SweepSettings),
    add_arguments,
)
def run_sweep(arguments: argparse.Namespace) -> int:
    """Runs the layouts given by the lists TPS, PPS, EPS, MBSZS, GPUS, ... and writes measured and predicted
    values side by side. Every flag can also be set as an environment variable: --tps as TPS. Repeat the
    command to run cases that have not run yet.
    """
    from moe_exp.config.settings_file import warn_of_misspelt
    from moe_exp.studies.sweep import driver

    warn_of_misspelt(SweepSettings.model_fields)
    others = ("command", "run", "dry_run", "retry_failed")
    flags = {name: value for name, value in vars(arguments).items() if name not in others}
    sweep = driver.Sweep.of(flags, os.environ)
    if arguments.dry_run:
        print(driver.dry_run_text(sweep, retry_failed=arguments.retry_failed))
        return 0
    return driver.run_sweep(sweep, retry_failed=arguments.retry_failed)


# Defaults for models that a CPU trains in seconds.
_MUP_MODEL = {
    "PRESET": "cpu", "HIDDEN_SIZE": "64", "NUM_HEADS": "4", "NUM_QUERY_GROUPS": "4", "FFN_HIDDEN_SIZE": "128",
    "MOE_FFN_HIDDEN_SIZE": "64", "NUM_LAYERS": "2", "NUM_EXPERTS": "8", "TOPK": "2", "OPTIMIZER": "adam",
    "PARAMETRIZATION": "mup", "MUP_BASE_HIDDEN_SIZE": "64", "GPUS_PER_NODE": "1", "EVAL_INTERVAL": "0",
    "ROUTING_KERNELS": "off", "MIN_LR": "0",
}  # fmt: skip
# With few tokens, a weight's gradient comes from single tokens, as in a wide model, instead of a sum whose
# terms cancel.
_MUP_CHECK = {
    "SEQ_LEN": "8", "MBSZ": "1", "GBSZ": "1", "LR": "4e-3", "LR_DECAY_STYLE": "constant", "WARMUP_ITERS": "0",
}  # fmt: skip
_MUP_TRANSFER = {"SEQ_LEN": "128", "MBSZ": "8", "GBSZ": "8", "TRAIN_ITERS": "150", "WARMUP_ITERS": "15"}


command("mup", "check how activations and the best learning rate depend on model size")


def _of_mup(repeats: int) -> tuple[Argument, ...]:
    """Returns the arguments that `mup check` and `mup transfer` share."""
    experts_help = "values of NUM_EXPERTS at the first width, such as 8,16 (default: the given NUM_EXPERTS)"
    parts_help = "expert granularities at the first width, such as 1,2; each multiplies TOPK and NUM_EXPERTS"
    return (
        arg("--widths", "HIDDEN_SIZE values to compare", default="64,128,256,512"),
        string("--experts", experts_help),
        string("--granularities", parts_help),
        arg("--repeats", "number of seeds per model", int, default=repeats),
        add_arguments,
    )


@command("mup check", "check how outputs and their changes during training scale with width and experts")
@takes(arg("--steps", "training iterations per model", default=10), *_of_mup(repeats=12))
def run_mup_check(arguments: argparse.Namespace) -> int:
    """Runs a coordinate check: trains small models of several sizes for a few steps on one micro-batch.
    Fits how each module's outputs, and their changes during training, scale with model size. Under muP,
    outputs and changes do not depend on the size; the exit code is 1 if any output or change does.
    """
    from moe_exp.host.progress import print_table, progress
    from moe_exp.studies.mup import LARGEST_SLOPE, growths, seeds

    axes = mup_models(arguments, _MUP_CHECK)
    from moe_exp.training.proxy import coordinates  # imports torch, so only after the checks

    ended_flat = True
    total = sum(len(models) for models in axes.values()) * arguments.repeats
    with progress("coordinate check", total, unit="models") as advance:
        for axis, models in axes.items():
            measured: dict[int, list[Any]] = {}
            for size, model in models.items():
                for config in seeds(model, arguments.repeats):
                    measured.setdefault(size, []).append(coordinates(config, arguments.steps))
                    advance(1)
            found = growths(measured)
            ended_flat &= all(one.is_flat for one in found)
            sizes = ", ".join(map(str, measured))
            title = f"{model.parametrization}, {axis} {sizes}: slopes of log2 |outputs| over log2 {axis}"
            rows = []
            for one in found:
                verdict = "flat" if one.is_flat else "NOT FLAT"
                rows.append((one.part, f"{one.initial:+.2f}", f"{one.change:+.2f}", verdict))
            print_table(title, ["part", "initial", "change by training", "verdict"], rows)
    print(f"flat: slopes are within {LARGEST_SLOPE} of 0")
    return 0 if ended_flat else 1


@command("mup transfer", "find the best learning rate at several model sizes and how much it changes")
@takes(
    string("--lrs", "comma-separated learning rates (default: LR / 8 to LR * 8, by factors of 2)"),
    arg("--jobs", "number of models trained concurrently", default=1),
    arg("--out", "output folder", default="mup_transfer"),
    *_of_mup(repeats=3),
)
def run_mup_transfer(arguments: argparse.Namespace) -> int:
    """Trains models of several sizes with several learning rates and compares the best rate of each size.
    Repeat the command to train the models that have no result yet. The exit code is 1 if the best rates
    differ by a factor of 1.5 or more, or if any size's best rate is the lowest or highest rate tried.
    """
    from moe_exp.host.files import write_atomically
    from moe_exp.host.progress import print_table
    from moe_exp.studies.child_runs import held
    from moe_exp.studies.mup import LARGEST_MOVE, draw_transfer, losses_of, moved, optimum, run_key

    given = _numbers("lrs", arguments.lrs, float)
    axes = mup_models(arguments, _MUP_TRANSFER)
    base = next(iter(next(iter(axes.values())).values()))
    rates = given or [base.lr * 2.0**k for k in range(-3, 4)]
    folder, repeats = Path(arguments.out), arguments.repeats
    every = [model for models in axes.values() for model in models.values()]
    with held(folder, f"OUT={folder}", "transfer"):
        losses = losses_of(every, rates, repeats, folder, trained_loss, arguments.jobs)
    lines, ended = [], True
    for axis, models in axes.items():
        by_model = {
            f"{axis} {size}": [
                [losses[run_key(model, rate, seed)] for rate in rates] for seed in range(repeats)
            ]
            for size, model in models.items()
        }
        optima = [optimum(name, rates, by_seed) for name, by_seed in by_model.items()]
        factor = moved(optima)
        ended &= factor < LARGEST_MOVE and not any(one.at_edge for one in optima)
        title = f"{base.parametrization}: the best LR changes by a factor of {factor:.2f} over {axis}"
        rows = [
            [one.name, f"{one.rate:.3g}{' (edge)' if one.at_edge else ''}", f"x/ {one.factor:.2f}",
             f"{min(sum(column) / len(column) for column in zip(*by_model[one.name], strict=True)):.4f}"]
            for one in optima
        ]  # fmt: skip
        print_table(title, ["model", "best LR", "seeds", "lowest loss"], rows)
        lines += [title, *("  " + "  ".join(row) for row in rows)]
        draw_transfer(folder / f"{axis}.png", title, rates, by_model)
    write_atomically(folder / "transfer.txt", "\n".join(lines) + "\n")
    print(f"{folder}/transfer.txt, losses.json, " + ", ".join(f"{axis}.png" for axis in axes))
    return 0 if ended else 1


# At module level, as `losses_of` calls it in other processes.
def trained_loss(config: Config) -> float:
    """Trains a model; returns the mean loss of the last tenth of the run, or inf if the loss diverged."""
    from moe_exp.training.proxy import Proxy

    proxy = Proxy(config)
    losses = [proxy.step() for _ in range(config.train_iters)]
    last = losses[-max(1, config.train_iters // 10) :]
    mean = sum(last) / len(last)
    return mean if math.isfinite(mean) else math.inf


def mup_models(arguments: argparse.Namespace, defaults: dict[str, str]) -> dict[str, dict[int, Config]]:
    """Maps axes (such as width) to models by size; all models train on the same data."""
    from moe_exp.studies.mup import models_of_axes

    base = load_config(with_file(_flags(arguments), os.environ), {**_MUP_MODEL, **defaults, **os.environ})
    for name in {"repeats", "steps", "jobs"} & vars(arguments).keys():
        if (value := getattr(arguments, name)) < 1:
            raise ConfigError([problem(name, value, "must be at least 1", f"omit --{name}")])
    names = ("widths", "experts", "granularities")
    axes = models_of_axes(base, *(_numbers(name, getattr(arguments, name)) for name in names))
    # prepare the corpus that all models share before the first one starts
    data = base.train_data
    if not data:
        from moe_exp.data.embedded import ensure_embedded_corpus

        data = str(ensure_embedded_corpus(Path(base.data_dir), base.vocab_size).train_prefix)
    return {
        axis: {size: model.model_copy(update={"train_data": data}) for size, model in models.items()}
        for axis, models in axes.items()
    }


def _numbers(name: str, text: str, kind: type = int) -> list[Any]:
    """Parses the comma-separated numbers of the option `name`; all options except `widths` may be empty."""
    if not text and name != "widths":
        return []
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) <= 0 or sorted(set(found)) != found or not all(map(math.isfinite, found)):
        rule = "must be a comma-separated list of positive numbers in increasing order"
        raise ConfigError([problem(name, text, rule, "use a list such as 64,128,256")])
    return found
