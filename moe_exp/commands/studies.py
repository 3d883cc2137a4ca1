"""`moe-exp compare`, `ladder`, `mup` and `sweep`: studies of many runs."""

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_exp.commands.parsers import Argument, arg, command, flag, repeated, string, takes
from moe_exp.config import Config, ConfigError, add_arguments, load_config, problem
from moe_exp.config.loading import with_file
from moe_exp.studies.sweep.settings import SweepSettings

_VARIANT = "another model, with settings of its own: fine:NUM_EXPERTS=64,TOPK=4; may be given more than once"


@command("compare", "train dense and MoE models under the same budget, and write a report")
@takes(
    string(
        "--runs",
        "moe (capacity), dmoe (dropless), dense, with commas (default: dmoe,dense; none with two --variant)",
    ),
    repeated("--variant NAME:SETTING=VALUE,...", _VARIANT),
    arg(
        "--match",
        "what is the same for all: flops, active-params (both per token, for the same tokens), or time"
        " (default: flops)",
        default="flops",
    ),
    arg(
        "--repeats",
        "runs of each with seeds SEED, SEED+1, ..., for an idea of noise (default: 1)",
        default="1",
    ),
    arg(
        "--seconds",
        "with --match time: training time of each (default: what the MoE takes for TRAIN_ITERS)",
        default="0",
    ),
    arg("--timeout", "seconds after which a run is ended, and the next begins (default: none)", default="0"),
    flag("--dry-run", "print the models, their sizes and the expected time, start and write nothing"),
    add_arguments,
)
def run_compare(arguments: argparse.Namespace) -> int:
    """Trains models one after another under the same budget, and writes what each has come to. The dense
    model gets the MLP width that matches the MoE. The same command again continues with what is left;
    RUN_NAME names the comparison.
    """
    from moe_exp.studies.compare.back_to_back import check_planned_files, dry_run, run_comparison
    from moe_exp.studies.compare.comparison import Comparison, Options

    flags, numbers = _read(arguments, "repeats", "seconds", "timeout")
    options = Options(arguments.runs, tuple(arguments.variant), arguments.match, **numbers)
    comparison = Comparison.of(options, flags, os.environ)
    if arguments.dry_run:
        print(dry_run(comparison), flush=True)
        check_planned_files(comparison)
        return 0
    return run_comparison(comparison)


@command("ladder", "train dense and MoE models at several sizes, fit scaling laws, and predict the largest")
@takes(
    arg(
        "definition", "YAML file with the rungs, or a name of the package's own (default: --sizes)", nargs="?"
    ),
    arg("--sizes", "HIDDEN_SIZE of each rung, such as 16,24,32,48; depth, tokens and LR follow by a rule"),
    arg("--runs", "moe (capacity), dmoe (dropless), dense, with commas (default: dmoe,dense)"),
    arg("--variant NAME:SETTING=VALUE,...", _VARIANT, action="append"),
    arg("--baseline", "the variant that the others are compared with (default: dense)"),
    arg("--repeats", "runs of each with seeds SEED, SEED+1, ... (default: 3)"),
    arg("--asymptote", "loss that no compute removes, nats per token, the same for all (default: fitted)"),
    arg("--executor", "local, or slurm for a job per run (default: $EXECUTOR, or local)"),
    arg("--sbatch", "options of the SLURM jobs, such as '--partition=gpu' (default: $SBATCH)"),
    arg("--timeout", "seconds after which a run is ended (default: none)", default="0"),
    flag("--dry-run", "print the rungs, start and write nothing"),
    add_arguments,
)
def run_ladder(arguments: argparse.Namespace) -> int:
    """Trains variants at several sizes with equal FLOPs per rung, fits the loss over compute of each, and
    reports the effective speedup over the baseline with intervals. The last rung is predicted before it runs.
    The same command again continues with what is left; RUN_NAME names the ladder.
    """
    from moe_exp.studies.ladder import climb
    from moe_exp.studies.ladder.ladder import Definition, Ladder, with_options

    flags, given = _read(arguments, "sizes", "repeats", "asymptote", "timeout")
    name = arguments.executor or os.environ.get("EXECUTOR") or "local"
    sbatch = shlex.split(arguments.sbatch or os.environ.get("SBATCH", ""))
    executor = climb.Executor(name, tuple(sbatch), given.pop("timeout"))
    if problems := executor.problems():
        raise ConfigError(problems)
    given |= {"runs": arguments.runs, "baseline": arguments.baseline}
    # None: as in the definition
    given["variants"] = tuple(arguments.variant) if arguments.variant else None
    definition = Definition.read(arguments.definition) if arguments.definition else Definition()
    chosen = with_options(definition, **given)
    ladder = Ladder.of(chosen, flags, os.environ, executor.timeout, executor=executor.name)
    if arguments.dry_run:
        print(climb.dry_run(ladder), flush=True)
        return 0
    return climb.run_ladder(ladder, executor)


def _read(arguments: argparse.Namespace, *numbers: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flags of training settings, and the values of options that are numbers."""
    from moe_exp.config.settings_file import warn_of_misspelt
    from moe_exp.studies.child_runs import numbers_in

    warn_of_misspelt()
    values = numbers_in({name: getattr(arguments, name) for name in numbers})
    return {name: getattr(arguments, name) for name in ("config", *Config.model_fields)}, values


@command("sweep", "run a few iterations of many layouts, and write a table of memory and time")
@takes(
    flag("--dry-run", "print the cases with what is predicted, start and write nothing"),
    flag("--retry-failed", "run those, too, that have failed, run out of memory or of time before"),
    lambda parser: add_arguments(parser, SweepSettings),
    add_arguments,
)
def run_sweep(arguments: argparse.Namespace) -> int:
    """Runs the layouts of the lists (TPS, PPS, EPS, MBSZS, GPUS, ...), and writes what was measured beside
    what was predicted. Every flag is also an environment variable: --tps is TPS. The same command again
    continues with what is left.
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


# Unless set: models that a CPU trains in seconds.
_MUP_MODEL = {
    "PRESET": "cpu", "HIDDEN_SIZE": "64", "NUM_HEADS": "4", "NUM_QUERY_GROUPS": "4", "FFN_HIDDEN_SIZE": "128",
    "MOE_FFN_HIDDEN_SIZE": "64", "NUM_LAYERS": "2", "NUM_EXPERTS": "8", "TOPK": "2", "OPTIMIZER": "adam",
    "PARAMETRIZATION": "mup", "MUP_BASE_HIDDEN_SIZE": "64", "GPUS_PER_NODE": "1", "EVAL_INTERVAL": "0",
    "ROUTING_KERNELS": "off", "MIN_LR": "0",
}  # fmt: skip
# With few tokens the gradient of a weight is that of single tokens, as in a wide model, and not a sum whose
# terms cancel.
_MUP_CHECK = {
    "SEQ_LEN": "8", "MBSZ": "1", "GBSZ": "1", "LR": "4e-3", "LR_DECAY_STYLE": "constant", "WARMUP_ITERS": "0",
}  # fmt: skip
_MUP_TRANSFER = {"SEQ_LEN": "128", "MBSZ": "8", "GBSZ": "8", "TRAIN_ITERS": "150", "WARMUP_ITERS": "15"}


command("mup", "check a parametrization over sizes: the size of activations, the best learning rate")


def _of_mup(repeats: int) -> tuple[Argument, ...]:
    """Arguments of both commands."""
    experts_help = "NUM_EXPERTS of the models, at the first width (default: NUM_EXPERTS alone)"
    parts_help = "experts split into this many, with as many times TOPK and NUM_EXPERTS, at the first width"
    widths = "64,128,256,512"
    return (
        arg("--widths", f"HIDDEN_SIZE of the models (default: {widths})", default=widths),
        string("--experts", experts_help),
        string("--granularities", parts_help),
        arg("--repeats", f"seeds of each model (default: {repeats})", int, default=repeats),
        add_arguments,
    )


@command(
    "mup check", "coordinate check: initial outputs and their changes by training, over width and experts"
)
@takes(arg("--steps", "iterations of each model (default: 10)", default=10), *_of_mup(repeats=12))
def run_mup_check(arguments: argparse.Namespace) -> int:
    """Trains small models of several sizes for a few steps on one micro-batch, and fits how the outputs of
    each part and their changes depend on the size. Under muP they do not. Exit code 1 if they do.
    """
    from moe_exp.host.progress import progress
    from moe_exp.studies.mup import LARGEST_SLOPE, growths, seeds

    axes = mup_models(arguments, _MUP_CHECK)
    from moe_exp.training.proxy import coordinates  # with torch, after the settings are known to be right

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
            _print_table(title, ["part", "initial", "change by training", "verdict"], rows)
    print(f"flat: slopes are within {LARGEST_SLOPE} of 0")
    return 0 if ended_flat else 1


@command("mup transfer", "the best learning rate of models of several sizes, and by how much it moves")
@takes(
    string("--lrs", "learning rates, with commas (default: LR times 1/8 to 8 by factors of 2)"),
    arg("--jobs", "models trained at a time (default: 1)", default=1),
    arg("--out", "folder (default: mup_transfer)", default="mup_transfer"),
    *_of_mup(repeats=3),
)
def run_mup_transfer(arguments: argparse.Namespace) -> int:
    """Trains models of several sizes with several learning rates, and compares the best of each size. The
    same command again continues with what is left. Exit code 1 if the best rate moves by more than a factor
    of 1.5.
    """
    from moe_exp.host.files import write_atomically
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
        title = f"{base.parametrization}: the best LR moves by a factor of {factor:.2f} over {axis}"
        rows = [
            [one.name, f"{one.rate:.3g}{' (edge)' if one.at_edge else ''}", f"x/ {one.factor:.2f}",
             f"{min(sum(column) / len(column) for column in zip(*by_model[one.name], strict=True)):.4f}"]
            for one in optima
        ]  # fmt: skip
        _print_table(title, ["model", "best LR", "seeds", "lowest loss"], rows)
        lines += [title, *("  " + "  ".join(row) for row in rows)]
        draw_transfer(folder / f"{axis}.png", title, rates, by_model)
    write_atomically(folder / "transfer.txt", "\n".join(lines) + "\n")
    print(f"{folder}/transfer.txt, losses.json, " + ", ".join(f"{axis}.png" for axis in axes))
    return 0 if ended else 1


# A function of the module: `losses_of` calls it in other processes.
def trained_loss(config: Config) -> float:
    """Mean loss of the last tenth of a run; inf if it diverged."""
    from moe_exp.training.proxy import Proxy

    proxy = Proxy(config)
    losses = [proxy.step() for _ in range(config.train_iters)]
    last = losses[-max(1, config.train_iters // 10) :]
    mean = sum(last) / len(last)
    return mean if math.isfinite(mean) else math.inf


def mup_models(arguments: argparse.Namespace, defaults: dict[str, str]) -> dict[str, dict[int, Config]]:
    """The models of each axis by size, on the data of the settings."""
    from moe_exp.studies.mup import models_of_axes

    flags = {name: getattr(arguments, name) for name in ("config", *Config.model_fields)}
    base = load_config(with_file(flags, os.environ), {**_MUP_MODEL, **defaults, **os.environ})
    for name in {"repeats", "steps", "jobs"} & vars(arguments).keys():
        if (value := getattr(arguments, name)) < 1:
            raise ConfigError([problem(name, value, "must be 1 or more", "leave it out")])
    names = ("widths", "experts", "granularities")
    axes = models_of_axes(base, *(_numbers(name, getattr(arguments, name)) for name in names))
    # one corpus for all models, prepared before the first of them starts
    data = base.train_data
    if not data:
        from moe_exp.data.embedded import ensure_embedded_corpus

        data = str(ensure_embedded_corpus(Path(base.data_dir), base.vocab_size).train_prefix)
    return {
        axis: {size: model.model_copy(update={"train_data": data}) for size, model in models.items()}
        for axis, models in axes.items()
    }


def _numbers(name: str, text: str, kind: type = int) -> list[Any]:
    """Values of a list that may be empty."""
    if not text and name != "widths":
        return []
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) <= 0 or sorted(set(found)) != found or not all(map(math.isfinite, found)):
        rule = "must be positive numbers with commas, each larger than the one before"
        raise ConfigError([problem(name, text, rule, "give a list such as 64,128,256")])
    return found


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
