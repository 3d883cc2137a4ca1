"""`moe-exp data tokenize` (also moe_exp/scripts/preprocess_data.py) and `moe-exp data train-tokenizer`."""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

from moe_exp.commands.guard import UNDER_WAY
from moe_exp.config import problem
from moe_exp.data.tokens.by_datatrove import EXECUTORS, tokenize_by_datatrove
from moe_exp.data.tokens.encoders import BACKENDS
from moe_exp.data.tokens.merge import merge_dry_run, merge_token_files
from moe_exp.data.tokens.parts import PartSettings
from moe_exp.data.tokens.preprocess import (
    dry_run,
    find_inputs,
    summary_rows,
    tokenize_files,
    tokenized_prefix,
)
from moe_exp.data.tokens.tokenizer import TOKENIZER_TYPES, load_tokenizer
from moe_exp.data.tokens.tokenizer_training import EOD_TOKEN, train_tokenizer
from moe_exp.host.progress import print_summary

logger = logging.getLogger(__name__)


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's commands."""
    _add_tokenize(
        subparsers.add_parser(
            "tokenize", help="JSONL files to Megatron's .bin/.idx, or token files of shards into one"
        )
    )
    _add_train(
        subparsers.add_parser(
            "train-tokenizer", help="a byte-level BPE from JSONL files, as a folder for AutoTokenizer"
        )
    )


def _add_tokenize(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "JSONL files to PREFIX_text_document.bin/.idx. The same bytes for any --workers; a run that was"
        f" killed goes on. Exit code {UNDER_WAY}: SLURM jobs are under way."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files, folders or quoted patterns of .jsonl, .jsonl.gz, .jsonl.zst",
    )
    what.add_argument(
        "--merge",
        nargs="+",
        metavar="PREFIX",
        help="token files of shards, in order, to join into --output-prefix",
    )
    parser.add_argument(
        "--output-prefix", required=True, help="path without suffix; --merge takes it as it is"
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="fields to tokenize, each into files of its own",
    )
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="Megatron's name of it")
    parser.add_argument(
        "--tokenizer-model", help="folder, tokenizer.json, name on the hub, or SentencePiece .model"
    )
    parser.add_argument("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    parser.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer")
    parser.add_argument(
        "--append-eod", action="store_true", help="end every document with the end-of-document token"
    )
    parser.add_argument("--eod-token", help="which one that is, where the tokenizer's files do not say")
    parser.add_argument(
        "--allow-special",
        action="store_true",
        help="read special tokens that occur in a text as such; they are text otherwise",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="processes (default: %(default)s); at most the cores there are",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="gigatoken, where it gives the same (auto), or the slower packages",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="skip and count bad lines instead of stopping at the first"
    )
    parser.add_argument("--start-over", action="store_true", help="make it again, and replace what is there")
    parser.add_argument(
        "--dry-run", action="store_true", help="tokens, disk and time by a sample; nothing is written"
    )
    cluster = parser.add_argument_group(
        "datatrove", "its tokenizer under one of its executors: slower, but it spreads over a cluster"
    )
    cluster.add_argument("--executor", choices=EXECUTORS)
    cluster.add_argument(
        "--tasks", type=int, default=1, help="each reads whole input files (default: %(default)s)"
    )
    cluster.add_argument("--slurm-partition")
    cluster.add_argument("--slurm-time", help="time limit of a task, as 8:00:00")
    ignored = parser.add_argument_group(
        "Megatron's, without effect", "parts, order and progress are as they should be without them"
    )
    ignored.add_argument("--partitions", type=int, help=argparse.SUPPRESS)
    ignored.add_argument("--log-interval", type=int, help=argparse.SUPPRESS)
    ignored.add_argument("--keep-sequential-samples", action="store_true", help=argparse.SUPPRESS)
    ignored.add_argument("--split-sentences", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=_tokenize)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains a byte-level BPE. Texts are streamed; memory grows with the number of different words."
    )
    parser.add_argument(
        "input",
        nargs="+",
        metavar="PATH",
        help="files, folders or quoted patterns of .jsonl, .jsonl.gz, .jsonl.zst",
    )
    parser.add_argument(
        "--vocab-size", type=int, required=True, help="tokens, special ones and the 256 bytes included"
    )
    parser.add_argument("--out", required=True, help="folder")
    parser.add_argument("--json-key", default="text", help="field with the text (default: %(default)s)")
    parser.add_argument("--eos-token", default=EOD_TOKEN, help="end-of-document token (default: %(default)s)")
    parser.add_argument("--bos-token", help="beginning-of-document token (default: none)")
    parser.add_argument("--pad-token", help="padding token (default: none)")
    parser.add_argument(
        "--max-megabytes",
        type=float,
        default=1000,
        help="of text; of every file the same share (default: %(default)s)",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="skip and count bad lines instead of stopping at the first"
    )
    parser.add_argument("--start-over", action="store_true", help="make it again, and replace what is there")
    parser.set_defaults(run=_train)


def _tokenize(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    if arguments.split_sentences:
        rule = "sentences are for BERT's pairs; a GPT model reads documents"
        raise ValueError(problem("split_sentences", True, rule, "leave it out"))
    if arguments.merge:
        return _merge(arguments)
    if arguments.tokenizer_type is None:
        raise ValueError(
            problem("tokenizer_type", "", "must be given", f"give one of {', '.join(TOKENIZER_TYPES)}")
        )
    if not arguments.append_eod:
        logger.warning("without --append-eod nothing marks where a document ends")
    inputs = find_inputs(arguments.input)
    tokenizer = load_tokenizer(
        arguments.tokenizer_type,
        model=arguments.tokenizer_model,
        vocab_file=arguments.vocab_file,
        merge_file=arguments.merge_file,
        eod_token=arguments.eod_token,
        allow_special=arguments.allow_special,
    )
    how, code = {"workers": arguments.workers, "backend": arguments.backend}, 0
    for json_key in arguments.json_keys:
        output = tokenized_prefix(arguments.output_prefix, json_key)
        settings = PartSettings(
            tokenizer, json_key, append_eod=arguments.append_eod, skip_bad=arguments.skip_bad
        )
        if arguments.dry_run:
            dry_run(inputs, output, settings, **how)
        elif arguments.executor:
            code = _by_datatrove(inputs, output, settings, arguments) or code
        else:
            manifest = tokenize_files(inputs, output, settings, start_over=arguments.start_over, **how)
            print_summary(f"tokenize: {output}", summary_rows(manifest, time.monotonic() - started))
            print(f"TRAIN_DATA={output} VOCAB_SIZE={tokenizer.vocab_size}")
    return code


def _merge(arguments: argparse.Namespace) -> int:
    prefixes, output = [Path(prefix) for prefix in arguments.merge], Path(arguments.output_prefix)
    if arguments.dry_run:
        merge_dry_run(prefixes, output)
        return 0
    manifest = merge_token_files(prefixes, output, start_over=arguments.start_over)
    print_summary("merge", {"documents": manifest["num_documents"], "tokens": manifest["num_tokens"]})
    print(f"TRAIN_DATA={output}")
    return 0


def _by_datatrove(
    inputs: list[Path], output: Path, settings: PartSettings, arguments: argparse.Namespace
) -> int:
    given = {"partition": arguments.slurm_partition, "time": arguments.slurm_time}
    manifest = tokenize_by_datatrove(
        inputs,
        output,
        settings,
        executor=arguments.executor,
        tasks=arguments.tasks,
        workers=arguments.workers,
        slurm={name: value for name, value in given.items() if value},
        start_over=arguments.start_over,
    )
    if manifest is None:
        print(
            f"{output}: SLURM jobs are under way; `squeue --me` shows them. The same command tells how far"
            " they are, and merges at last."
        )
        return UNDER_WAY
    rows = {
        "documents": manifest["num_documents"],
        "tokens": manifest["num_tokens"],
        "end-of-document tokens": manifest["num_eods"],
    }
    skipped = {f"skipped: {reason}": number for reason, number in manifest["skipped"].items()}
    print_summary(f"tokenize: {output}", rows | skipped)
    print(f"TRAIN_DATA={output} VOCAB_SIZE={settings.tokenizer.vocab_size}")
    return 0


def _train(arguments: argparse.Namespace) -> int:
    manifest = train_tokenizer(
        find_inputs(arguments.input),
        Path(arguments.out),
        vocab_size=arguments.vocab_size,
        json_key=arguments.json_key,
        eos_token=arguments.eos_token,
        bos_token=arguments.bos_token,
        pad_token=arguments.pad_token,
        max_bytes=int(arguments.max_megabytes * 1e6),
        skip_bad=arguments.skip_bad,
        start_over=arguments.start_over,
    )
    rows = {
        "documents": manifest["num_documents"],
        "MB of text": f"{manifest['num_text_bytes'] / 1e6:.1f}",
        "tokens": manifest["vocab_size"],
    }
    print_summary(f"train-tokenizer: {arguments.out}", rows)
    print(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {arguments.out}")
    return 0
