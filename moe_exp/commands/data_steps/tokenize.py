"""`moe-exp data tokenize` (also moe_exp/scripts/preprocess_data.py), `train-tokenizer` and `mix`."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import time
from pathlib import Path

from moe_exp.commands.data_steps.shared import (
    add_execution,
    add_text_documents,
    execution_of,
    memory_bytes,
    under_way,
)
from moe_exp.commands.guard import UNDER_WAY
from moe_exp.config import setting_error
from moe_exp.data.documents import find_inputs
from moe_exp.data.execution import num_workers
from moe_exp.data.kinds import KINDS, TextRule
from moe_exp.data.tokens.encoders import BACKENDS
from moe_exp.data.tokens.parts import PartSettings
from moe_exp.data.tokens.preprocess import (
    dry_run,
    merge_dry_run,
    merge_token_files,
    summary_rows,
    tokenize_documents,
    tokenized_prefix,
    usable,
)
from moe_exp.data.tokens.tokenizer import TOKENIZER_TYPES, load_tokenizer
from moe_exp.data.tokens.tokenizer_training import EOD_TOKEN, train_tokenizer
from moe_exp.host.files import bytes_text
from moe_exp.host.progress import print_summary

logger = logging.getLogger(__name__)


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's commands."""
    about = "files of documents to Megatron's .bin/.idx, or token files of shards into one"
    _add_tokenize(subparsers.add_parser("tokenize", help=about))
    about = "a byte-level BPE from files of documents, as a folder for AutoTokenizer"
    _add_train(subparsers.add_parser("train-tokenizer", help=about))
    about = "prepare and tokenize the sources of a mixture, with weights and a datasheet"
    _add_mix(subparsers.add_parser("mix", help=about))


def _add_tokenize(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Documents to PREFIX_text_document.bin/.idx. The same bytes for any --workers and --tasks; a run that"
        f" was killed continues. Exit code {UNDER_WAY}: SLURM jobs are under way."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    add = what.add_argument
    about = f"files, folders or quoted patterns: {KINDS}"
    add("--input", nargs="+", metavar="PATH", help=about)
    about = "token files of shards, in order, to join into --output-prefix"
    add("--merge", nargs="+", metavar="PREFIX", help=about)
    add = parser.add_argument
    add("--output-prefix", required=True, help="path without suffix; --merge takes it as it is")
    about = "fields to tokenize, each into files of its own"
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help=about)
    add("--tokenizer-type", choices=TOKENIZER_TYPES, help="Megatron's name of it")
    add("--tokenizer-model", help="folder, tokenizer.json, name on the hub, or SentencePiece .model")
    add("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", help="merges.txt of GPT2BPETokenizer")
    add("--append-eod", action="store_true", help="end every document with the end-of-document token")
    add("--prepend-bos", action="store_true", help="begin every document with the tokenizer's BOS")
    add("--eod-token", help="which one that is, where the tokenizer's files do not say")
    about = "read special tokens that occur in a text as such; they are text otherwise"
    add("--allow-special", action="store_true", help=about)
    about = "gigatoken, where it gives the same (auto), or the slower packages"
    add("--backend", choices=BACKENDS, default="auto", help=about)
    add_text_documents(parser)
    add("--skip-bad", action="store_true", help="skip and count bad lines instead of stopping at the first")
    add("--start-over", action="store_true", help="make it again, and replace what is there")
    add("--dry-run", action="store_true", help="tokens, disk and time by a sample; nothing is written")
    about = "tasks, on as many cores or machines (default: none, processes of this one)"
    add_execution(parser.add_argument_group("where it runs"), about)
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
    add = parser.add_argument
    about = f"files, folders or quoted patterns: {KINDS}"
    add("input", nargs="+", metavar="PATH", help=about)
    add("--vocab-size", type=int, required=True, help="tokens, special ones and the 256 bytes included")
    add("--out", required=True, help="folder")
    add("--json-key", default="text", help="field with the text (default: %(default)s)")
    add("--eos-token", default=EOD_TOKEN, help="end-of-document token (default: %(default)s)")
    add("--bos-token", help="beginning-of-document token (default: none)")
    add("--pad-token", help="padding token (default: none)")
    about = "of text; of every file the same share (default: %(default)s)"
    add("--max-megabytes", type=float, default=1000, help=about)
    add_text_documents(parser)
    add("--skip-bad", action="store_true", help="skip and count bad lines instead of stopping at the first")
    add("--start-over", action="store_true", help="make it again, and replace what is there")
    parser.set_defaults(run=_train)


def _add_mix(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Downloads, filters, shuffles and tokenizes every source of a mixture.yaml (docs/corpus.md),"
        " computes their weights, and writes DATA_DIR/NAME with token files and datasheet.md. Called"
        f" again, it resumes where it stopped. Exit code {UNDER_WAY}: SLURM jobs are under way."
    )
    add = parser.add_argument
    add("mixture", type=Path, help="mixture.yaml")
    add("--name", help="of the mixture (default: the file's name)")
    add("--data-dir", type=Path, default=Path("data"), metavar="FOLDER", help="(default: data)")
    add("--start-over", action="store_true", help="make everything again but the downloads")
    about = "make this source again; may be repeated"
    add("--start-over-source", action="append", default=[], metavar="NAME", help=about)
    add("--download-again", action="store_true", help="fetch the files again too")
    add("--dry-run", action="store_true", help="print files, disk and time of each source, and write nothing")
    about = "of a task of the shuffle, as in 8GB (default: a quarter of what is left for all of them)"
    add("--memory", type=memory_bytes, metavar="SIZE", help=about)
    group = parser.add_argument_group("where the tasks run")
    add_execution(group, "number of chunks of a source (default: one per input file, at most 64)")
    about = "tasks of a shuffle (default: 1; on SLURM and Ray as many as chunks if over 50 GB)"
    group.add_argument("--shuffle-tasks", type=int, metavar="N", help=about)
    parser.set_defaults(run=_mix)


def _tokenize(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    if arguments.split_sentences:
        rule = "sentences are for BERT's pairs; a GPT model reads documents"
        raise setting_error("split_sentences", True, rule, "leave it out")
    if arguments.merge:
        return _merge(arguments)
    if arguments.tokenizer_type is None:
        rule = "must be given"
        raise setting_error("tokenizer_type", "", rule, f"give one of {', '.join(TOKENIZER_TYPES)}")
    if not arguments.append_eod:
        logger.warning("without --append-eod nothing marks where a document ends")
    options = {name: getattr(arguments, name) for name in ("vocab_file", "merge_file", "eod_token")}
    options |= {"model": arguments.tokenizer_model, "allow_special": arguments.allow_special}
    tokenizer = load_tokenizer(arguments.tokenizer_type, prepend_bos=arguments.prepend_bos, **options)
    tokenizer.log_left_out()
    execution, code = execution_of(arguments), 0
    files = {key: find_inputs(arguments.input, text_field=key) for key in arguments.json_keys}
    for json_key in arguments.json_keys:
        inputs, output = files[json_key], tokenized_prefix(arguments.output_prefix, json_key)
        eod_and_bad = {"append_eod": arguments.append_eod, "skip_bad": arguments.skip_bad}
        settings = PartSettings(tokenizer, json_key, **eod_and_bad, rule=TextRule(arguments.text_documents))
        if arguments.dry_run:
            workers = arguments.tasks or usable(num_workers(execution))
            options = {"backend": arguments.backend, "by_tasks": arguments.tasks is not None}
            dry_run(inputs, output, settings, workers=workers, **options)
            continue
        how = {name: getattr(arguments, name) for name in ("tasks", "backend", "start_over")}
        manifest = tokenize_documents(inputs, output, settings, execution=execution, **how)
        if manifest is None:
            code = under_way(str(output))
        else:
            print_summary(f"tokenize: {output}", summary_rows(manifest, time.monotonic() - started))
            print(f"TRAIN_DATA={shlex.quote(str(output))} VOCAB_SIZE={tokenizer.vocab_size}")
    return code


def _merge(arguments: argparse.Namespace) -> int:
    prefixes, output = [Path(prefix) for prefix in arguments.merge], Path(arguments.output_prefix)
    if arguments.dry_run:
        merge_dry_run(prefixes, output)
        return 0
    manifest = merge_token_files(prefixes, output, start_over=arguments.start_over)
    print_summary("merge", {"documents": manifest["num_documents"], "tokens": manifest["num_tokens"]})
    print(f"TRAIN_DATA={shlex.quote(str(output))}")
    return 0


def _train(arguments: argparse.Namespace) -> int:
    same = ("vocab_size", "json_key", "eos_token", "bos_token", "pad_token", "skip_bad", "start_over")
    options = {name: getattr(arguments, name) for name in same}
    max_bytes = int(arguments.max_megabytes * 1e6)
    options |= {"max_bytes": max_bytes, "rule": TextRule(arguments.text_documents)}
    inputs = find_inputs(arguments.input, text_field=arguments.json_key)
    manifest = train_tokenizer(inputs, Path(arguments.out), **options)
    rows = {"documents": manifest["num_documents"], "text": bytes_text(manifest["num_text_bytes"])}
    print_summary(f"train-tokenizer: {arguments.out}", rows | {"tokens": manifest["vocab_size"]})
    print(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {shlex.quote(str(arguments.out))}")
    return 0


def _mix(arguments: argparse.Namespace) -> int:
    from moe_exp.data.mixture import Mixing, mix, read_mixture
    from moe_exp.data.prepare import plan

    names = ("data_dir", "tasks", "shuffle_tasks", "start_over", "download_again")
    mixing = Mixing(
        arguments.name or arguments.mixture.stem,
        read_mixture(arguments.mixture),
        execution=execution_of(arguments),
        shuffle={"memory_bytes": arguments.memory},
        start_over_sources=tuple(arguments.start_over_source),
        workers=arguments.workers or os.cpu_count() or 1,
        **{name: getattr(arguments, name) for name in names},
    )
    if arguments.dry_run:
        preparations = mixing.preparations()
        mixing.tokenizer()  # for what may be wrong with it
        for wanted in preparations.values():
            plan(wanted)
        return 0
    facts = mix(mixing)
    if facts is None:
        return under_way()
    print(f"datasheet: {mixing.folder / 'datasheet.md'}")
    for_training = ("train_data", "valid_data", "vocab_size", "tokenizer")
    print(*(f"{name.upper()}={shlex.quote(str(facts[name]))}" for name in for_training))
    return 0
