"""`moe-exp convert from-hf` and `moe-exp convert to-hf`."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_exp.commands.data_steps.shuffle import memory_bytes
from moe_exp.commands.guard import ExactParser

_DTYPES = ("fp32", "bf16", "fp16")


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's commands."""
    parser = subparsers.add_parser(
        "convert", help="checkpoints from and to Hugging Face folders; docs/huggingface.md"
    )
    commands = parser.add_subparsers(
        dest="convert_command", metavar="command", required=True, parser_class=ExactParser
    )
    _add_from_hf(commands)
    _add_to_hf(commands)


def _add_from_hf(commands: argparse._SubParsersAction[ExactParser]) -> None:
    parser = commands.add_parser(
        "from-hf",
        help="a Hugging Face folder -> a checkpoint to train from",
        description=(
            "Writes a checkpoint with the weights of a Hugging Face folder, its tokenizer, and settings.env"
            " for the run that goes on from it. One tensor is in memory at a time. Every tensor has to be"
            " used; nothing is written otherwise."
        ),
    )
    parser.add_argument(
        "source", type=Path, metavar="SRC", help="folder with config.json and safetensors files"
    )
    parser.add_argument("target", type=Path, metavar="DST", help="checkpoints folder to make")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights (default: as they are)")
    parser.add_argument(
        "--drop-mtp", action="store_true", help="leave out the layers for multi-token prediction"
    )
    ignore_help = "field of config.json that is known to change nothing; may be repeated"
    parser.add_argument("--ignore-field", action="append", default=[], metavar="NAME", help=ignore_help)
    parser.set_defaults(run=_from_hf)


def _add_to_hf(commands: argparse._SubParsersAction[ExactParser]) -> None:
    parser = commands.add_parser(
        "to-hf",
        help="a checkpoint -> a Hugging Face folder for transformers, vLLM, TensorRT-LLM",
        description=(
            "Writes safetensors files, their index, config, generation config, tokenizer and a model card."
            " The architecture is the one of transformers that computes what the model computes; where there"
            " is none, it says what is in the way."
        ),
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SRC",
        help="run folder, checkpoints folder, or that of one iteration; any layout",
    )
    parser.add_argument("target", type=Path, metavar="DST", help="folder to make")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights (default: as they are)")
    weights_help = (
        "model: those that the model computes with; main: the fp32 copies of the optimizer (default: model)"
    )
    parser.add_argument("--weights", choices=("model", "main"), default="model", help=weights_help)
    size_help = "of one file; a larger tensor has its own (default: 5GB)"
    parser.add_argument(
        "--max-shard-size", type=memory_bytes, default=5 * 10**9, metavar="SIZE", help=size_help
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="folder or tokenizer.json (default: TOKENIZER of the run)",
    )
    like_help = (
        "take generation_config.json, token ids and max_position_embeddings of this Hugging Face folder"
    )
    parser.add_argument("--like", type=Path, metavar="FOLDER", help=like_help)
    parser.set_defaults(run=_to_hf)


def _from_hf(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.hf.importing import from_hf
    from moe_exp.host.progress import progress

    done = from_hf(
        arguments.source,
        arguments.target,
        dtype=arguments.dtype,
        drop_mtp=arguments.drop_mtp,
        ignore_fields=arguments.ignore_field,
        progress=progress,
    )
    print(f"{arguments.target}: {done.architecture}, {done.config.dtype}")
    for note in done.notes:
        print(f"Note: {note}")
    print(f"Train on from it:\n  {done.command}")


def _to_hf(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.hf.exporting import to_hf
    from moe_exp.host.progress import progress

    done = to_hf(
        arguments.source,
        arguments.target,
        dtype=arguments.dtype,
        main_weights=arguments.weights == "main",
        max_shard_bytes=arguments.max_shard_size,
        tokenizer=arguments.tokenizer,
        like=arguments.like,
        progress=progress,
    )
    print(f"{arguments.target}: {done.architecture}, {done.num_bytes / 1e9:.2f} GB of weights")
    for name, reasons in done.against.items():
        print(f"  not {name}: {', '.join(reasons)}")
    for note in done.notes:
        print(f"Note: {note}")
