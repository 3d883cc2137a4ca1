"""`moe-exp mup`: whether sizes and the best learning rate hold over models of several sizes."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_exp.commands.guard import add_subcommands
from moe_exp.config import Config, ConfigError, add_arguments, load_config, problem
from moe_exp.config.loading import with_file
from moe_exp.host.files import write_atomically
from moe_exp.host.progress import progress

# Unless set: models that a CPU trains in seconds.
_SMALL = {
    "PRESET": "cpu", "HIDDEN_SIZE": "64", "NUM_HEADS": "4", "NUM_QUERY_GROUPS": "4", "FFN_HIDDEN_SIZE": "128",
    "MOE_FFN_HIDDEN_SIZE": "64", "NUM_LAYERS": "2", "NUM_EXPERTS": "8", "TOPK": "2", "OPTIMIZER": "adam",
    "PARAMETRIZATION": "mup", "MUP_BASE_HIDDEN_SIZE": "64", "GPUS_PER_NODE": "1", "EVAL_INTERVAL": "0",
    "ROUTING_KERNELS": "off", "MIN_LR": "0",
}  # fmt: skip
# With few tokens the gradient of a weight is that of single tokens, as in a wide model, and not a sum whose
# terms cancel.
_CHECK = {
    "SEQ_LEN": "8", "MBSZ": "1", "GBSZ": "1", "LR": "4e-3", "LR_DECAY_STYLE": "constant", "WARMUP_ITERS": "0",
}  # fmt: skip
_TRANSFER = {"SEQ_LEN": "128", "MBSZ": "8", "GBSZ": "8", "TRAIN_ITERS": "150", "WARMUP_ITERS": "15"}


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "check a parametrization over sizes: the size of activations, the best learning rate"
    commands = add_subcommands(subparsers.add_parser("mup", help=about), "mup")
    check = commands.add_parser(
        "check",
        help="coordinate check: initial outputs and their changes by training, over width and experts",
        description=(
            "Trains small models of several sizes for a few steps on one micro-batch, and fits how the"
            " outputs of each part and their changes depend on the size. Under muP they do not. Exit code 1"
            " if they do."
        ),
    )
    check.add_argument("--steps", type=int, default=10, help="iterations of each model (default: 10)")
    check.set_defaults(run=_check)
    transfer = commands.add_parser(
        "transfer",
        help="the best learning rate of models of several sizes, and by how much it moves",
        description=(
            "Trains models of several sizes with several learning rates, and compares the best of each size."
            " The same command again continues with what is left. Exit code 1 if the best rate moves by more"
            " than a factor of 1.5."
        ),
    )
    about = "learning rates, with commas (default: LR times 1/8 to 8 by factors of 2)"
    transfer.add_argument("--lrs", default="", help=about)
    transfer.add_argument("--jobs", type=int, default=1, help="models trained at a time (default: 1)")
    transfer.add_argument("--out", default="mup_transfer", help="folder (default: mup_transfer)")
    transfer.set_defaults(run=_transfer)
    for parser, repeats in ((check, 12), (transfer, 3)):
        add = parser.add_argument
        add("--widths", default="64,128,256,512", help="HIDDEN_SIZE of the models (default: 64,128,256,512)")
        about = "NUM_EXPERTS of the models, at the first width (default: NUM_EXPERTS alone)"
        add("--experts", default="", help=about)
        about = "experts split into this many, with as many times TOPK and NUM_EXPERTS, at the first width"
        add("--granularities", default="", help=about)
        add("--repeats", type=int, default=repeats, help=f"seeds of each model (default: {repeats})")
        add_arguments(parser)


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


def _models(arguments: argparse.Namespace, defaults: dict[str, str]) -> dict[str, dict[int, Config]]:
    """The models of each axis by size, on the data of the settings."""
    from moe_exp.studies.mup import models_of_axes

    flags = {name: getattr(arguments, name) for name in ("config", *Config.model_fields)}
    base = load_config(with_file(flags, os.environ), {**_SMALL, **defaults, **os.environ})
    for name in {"repeats", "steps", "jobs"} & vars(arguments).keys():
        if (value := getattr(arguments, name)) < 1:
            raise ConfigError([problem(name, value, "must be 1 or more", "leave it out")])
    names = ("widths", "experts", "granularities")
    axes = models_of_axes(base, *(_numbers(name, getattr(arguments, name)) for name in names))
    data = base.train_data
    if not data:
        from moe_exp.data.embedded import ensure_embedded_corpus

        data = str(ensure_embedded_corpus(Path(base.data_dir), base.vocab_size).train_prefix)
    return {
        axis: {size: model.model_copy(update={"train_data": data}) for size, model in models.items()}
        for axis, models in axes.items()
    }


def _check(arguments: argparse.Namespace) -> int:
    from moe_exp.studies.mup import LARGEST_SLOPE, growths, seeds

    axes = _models(arguments, _CHECK)
    from moe_exp.training.proxy import coordinates

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


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _train(config: Config) -> float:
    """Mean loss of the last tenth of a run; inf if it diverged."""
    from moe_exp.training.proxy import Proxy

    proxy = Proxy(config)
    losses = [proxy.step() for _ in range(config.train_iters)]
    last = losses[-max(1, config.train_iters // 10) :]
    mean = sum(last) / len(last)
    return mean if math.isfinite(mean) else math.inf


def _transfer(arguments: argparse.Namespace) -> int:
    from moe_exp.studies.child_runs import held
    from moe_exp.studies.mup import LARGEST_MOVE, draw_transfer, losses_of, moved, optimum, run_key

    given = _numbers("lrs", arguments.lrs, float)
    axes = _models(arguments, _TRANSFER)
    base = next(iter(next(iter(axes.values())).values()))
    rates = given or [base.lr * 2.0**k for k in range(-3, 4)]
    folder, repeats = Path(arguments.out), arguments.repeats
    every = [model for models in axes.values() for model in models.values()]
    with held(folder, f"OUT={folder}", "transfer"):
        losses = losses_of(every, rates, repeats, folder, _train, arguments.jobs)
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
