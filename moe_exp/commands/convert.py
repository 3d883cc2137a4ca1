"""`moe-exp convert from-hf` and `moe-exp convert to-hf`."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_exp.commands.data_steps.shared import memory_bytes
from moe_exp.commands.guard import add_subcommands
from moe_exp.host.files import bytes_text

_DTYPES = ("fp32", "bf16", "fp16")


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("convert", help="convert checkpoints from and to Hugging Face format")
    commands = add_subcommands(parser, "convert")
    parser = commands.add_parser(
        "from-hf",
        help="convert a Hugging Face folder to a checkpoint for training",
        description=(
            "Writes a checkpoint with the weights of a Hugging Face folder, its tokenizer, and settings.env"
            " for the run that continues from it. One tensor is in memory at a time. Every tensor has to be"
            " used; nothing is written otherwise."
        ),
    )
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="folder with config.json and safetensors files")
    add("target", type=Path, metavar="DST", help="checkpoints folder to make")
    add("--dtype", choices=_DTYPES, help="of the weights (default: as they are)")
    add("--drop-mtp", action="store_true", help="leave out the layers for multi-token prediction")
    ignore_help = "field of config.json that is known to change nothing; may be repeated"
    add("--ignore-field", action="append", default=[], metavar="NAME", help=ignore_help)
    parser.set_defaults(run=_from_hf)
    parser = commands.add_parser(
        "to-hf",
        help="convert a checkpoint to a Hugging Face folder",
        description=(
            "Writes safetensors files, their index, config, generation config, tokenizer and a model card."
            " The architecture is the one of transformers that computes what the model computes; where there"
            " is none, it says what is in the way."
        ),
    )
    add = parser.add_argument
    about = "run folder, checkpoints folder, or that of one iteration; any layout"
    add("source", type=Path, metavar="SRC", help=about)
    add("target", type=Path, metavar="DST", help="folder to make")
    add("--dtype", choices=_DTYPES, help="of the weights (default: as they are)")
    weights_help = (
        "model: those that the model computes with; main: the fp32 copies of the optimizer (default: model)"
    )
    add("--weights", choices=("model", "main"), default="model", help=weights_help)
    size_help = "of one file; a larger tensor has its own (default: 5GB)"
    add("--max-shard-size", type=memory_bytes, default=5 * 10**9, metavar="SIZE", help=size_help)
    about = "folder or tokenizer.json (default: TOKENIZER of the run)"
    add("--tokenizer", type=Path, metavar="PATH", help=about)
    like_help = (
        "take generation_config.json, token ids and max_position_embeddings of this Hugging Face folder"
    )
    add("--like", type=Path, metavar="FOLDER", help=like_help)
    parser.set_defaults(run=_to_hf)


def _from_hf(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.hf.importing import from_hf

    options = {"dtype": arguments.dtype, "drop_mtp": arguments.drop_mtp}
    done = from_hf(arguments.source, arguments.target, **options, ignore_fields=arguments.ignore_field)
    print(f"{arguments.target}: {done.architecture}, {done.config.dtype}")
    print(*(f"Note: {note}" for note in done.notes), f"Train on from it:\n  {done.command}", sep="\n")


def _to_hf(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.hf.exporting import to_hf

    options = {name: getattr(arguments, name) for name in ("dtype", "tokenizer", "like")}
    options |= {"main_weights": arguments.weights == "main", "max_shard_bytes": arguments.max_shard_size}
    done = to_hf(arguments.source, arguments.target, **options)
    print(f"{arguments.target}: {done.architecture}, {bytes_text(done.num_bytes)} of weights")
    for note in done.notes:
        print(f"Note: {note}")
