"""Subcommands of `moe-exp data`: tokenize, train-tokenizer, mix, push, pull, inspect and verify."""

import argparse
import logging
import os
import shlex
import time
from pathlib import Path

from moe_exp.commands import data
from moe_exp.commands.data import TEXT_DOCUMENTS, execution, execution_of, under_way
from moe_exp.commands.parsers import JSON, arg, command, flag, group, one_of, print_json, repeated, takes
from moe_exp.config import setting_error
from moe_exp.data.documents import find_inputs
from moe_exp.data.execution import num_workers
from moe_exp.data.kinds import KINDS, TextRule
from moe_exp.data.tokens import preprocess
from moe_exp.data.tokens.encoders import BACKENDS
from moe_exp.data.tokens.parts import PartSettings
from moe_exp.data.tokens.tokenizer import TOKENIZER_TYPES, load_tokenizer
from moe_exp.data.tokens.tokenizer_training import EOD_TOKEN, train_tokenizer
from moe_exp.host.files import bytes_text
from moe_exp.host.progress import print_summary

logger = logging.getLogger(__name__)

_SKIP_BAD = flag("--skip-bad", "skip and count invalid lines instead of stopping at the first one")
_START_OVER = flag("--start-over", "create the output again and replace existing files")


@command("data tokenize", "tokenize documents into Megatron's .bin/.idx files, or merge token files")
@takes(
    one_of(
        arg("--input PATH", f"files, folders or patterns in quotes; file types: {KINDS}", nargs="+"),
        arg("--merge PREFIX", "prefixes of token files to merge in this order into --output-prefix",
            nargs="+"),
        required=True,
    ),
    arg("--output-prefix", "output path without suffix; _KEY_document (KEY from --json-keys) is appended "
        "unless --merge is used", required=True),
    arg("--json-keys KEY", "fields to tokenize; each field gets its own files (default: text)", nargs="+",
        default=["text"]),
    arg("--tokenizer-type", "tokenizer type, as named in Megatron", choices=TOKENIZER_TYPES),
    arg("--tokenizer-model", "tokenizer folder, tokenizer.json, name on the Hub, or SentencePiece .model"),
    arg("--vocab-file", "vocab.json of GPT2BPETokenizer"),
    arg("--merge-file", "merges.txt of GPT2BPETokenizer"),
    flag("--append-eod", "end every document with the end-of-document token"),
    flag("--prepend-bos", "begin every document with the beginning-of-sequence token"),
    arg("--eod-token", "end-of-document token, needed if the tokenizer's files define none"),
    flag("--allow-special", "encode the text of a special token as that token (default: as ordinary text)"),
    arg("--backend", "tokenizer implementation; auto: gigatoken if it gives the same ids as the tokenizer's "
        "own package, otherwise that package",
        choices=BACKENDS, default="auto"),
    TEXT_DOCUMENTS,
    _SKIP_BAD,
    _START_OVER,
    flag("--dry-run", "estimate token count, disk space and run time from a sample; write nothing"),
    group(
        "execution",
        *execution("number of tasks on separate cores or machines (default: --workers processes instead)"),
    ),
    group(
        "Megatron's options without effect",
        arg("--partitions", argparse.SUPPRESS, int),
        arg("--log-interval", argparse.SUPPRESS, int),
        flag("--keep-sequential-samples", argparse.SUPPRESS),
        flag("--split-sentences", argparse.SUPPRESS),
        about="accepted for compatibility",
    ),
)  # fmt: skip
def run_tokenize(arguments: argparse.Namespace) -> int:
    """Tokenizes documents into PREFIX_text_document.bin/.idx. The contents of these files do not depend on
    --workers or --tasks. Repeat the command to resume. Exit code 75: SLURM jobs are under way.
    """
    started = time.monotonic()
    if arguments.split_sentences:
        rule = "is not supported because only BERT models use sentences"
        raise setting_error("split_sentences", True, rule, "omit --split-sentences")
    if arguments.merge:
        prefixes, joined = [Path(prefix) for prefix in arguments.merge], Path(arguments.output_prefix)
        if arguments.dry_run:
            preprocess.merge_dry_run(prefixes, joined)
            return 0
        facts = preprocess.merge_token_files(prefixes, joined, start_over=arguments.start_over)
        print_summary("merge", {"documents": facts["num_documents"], "tokens": facts["num_tokens"]})
        print(f"TRAIN_DATA={shlex.quote(str(joined))}")
        return 0
    if arguments.tokenizer_type is None:
        fix = f"set --tokenizer-type to one of {', '.join(TOKENIZER_TYPES)}"
        raise setting_error("tokenizer_type", "", "must be given", fix)
    if not arguments.append_eod:
        logger.warning("without --append-eod, the ends of documents are not marked")
    options = {name: getattr(arguments, name) for name in ("vocab_file", "merge_file", "eod_token")}
    options |= {"model": arguments.tokenizer_model, "allow_special": arguments.allow_special}
    tokenizer = load_tokenizer(arguments.tokenizer_type, prepend_bos=arguments.prepend_bos, **options)
    tokenizer.log_left_out()
    execution, code = execution_of(arguments), 0
    # check the inputs of all keys first: tokenizing one key may take hours
    files = {key: find_inputs(arguments.input, text_field=key) for key in arguments.json_keys}
    for json_key in arguments.json_keys:
        inputs, output = files[json_key], preprocess.tokenized_prefix(arguments.output_prefix, json_key)
        eod_and_bad = {"append_eod": arguments.append_eod, "skip_bad": arguments.skip_bad}
        settings = PartSettings(tokenizer, json_key, **eod_and_bad, rule=TextRule(arguments.text_documents))
        if arguments.dry_run:
            workers = arguments.tasks or preprocess.usable(num_workers(execution))
            options = {"backend": arguments.backend, "by_tasks": arguments.tasks is not None}
            preprocess.dry_run(inputs, output, settings, workers=workers, **options)
            continue
        how = {name: getattr(arguments, name) for name in ("tasks", "backend", "start_over")}
        manifest = preprocess.tokenize_documents(inputs, output, settings, execution=execution, **how)
        if manifest is None:
            code = under_way(str(output))
        else:
            rows = preprocess.summary_rows(manifest, time.monotonic() - started)
            print_summary(f"tokenize: {output}", rows)
            print(f"TRAIN_DATA={shlex.quote(str(output))} VOCAB_SIZE={tokenizer.vocab_size}")
    return code


@command("data train-tokenizer", "train a byte-level BPE tokenizer and save it as a folder for AutoTokenizer")
@takes(
    arg("input PATH", f"files, folders or patterns in quotes; file types: {KINDS}", nargs="+"),
    arg("--vocab-size", "vocabulary size, including special tokens and the 256 single-byte tokens", int,
        required=True),
    arg("--out", "folder for the tokenizer", required=True),
    arg("--json-key", "field that contains the text", default="text"),
    arg("--eos-token", "end-of-document token", default=EOD_TOKEN),
    arg("--bos-token", "beginning-of-document token (default: none)"),
    arg("--pad-token", "padding token (default: none)"),
    arg("--max-megabytes", "maximum amount of training text (MB), an equal share from each file", float,
        default=1000),
    TEXT_DOCUMENTS,
    _SKIP_BAD,
    _START_OVER,
)  # fmt: skip
def run_train_tokenizer(arguments: argparse.Namespace) -> None:
    """Trains a byte-level BPE tokenizer. Streams the text; memory grows with the number of distinct words."""
    same = ("vocab_size", "json_key", "eos_token", "bos_token", "pad_token", "skip_bad", "start_over")
    options = {name: getattr(arguments, name) for name in same}
    options |= {"max_bytes": int(arguments.max_megabytes * 1e6), "rule": TextRule(arguments.text_documents)}
    inputs = find_inputs(arguments.input, text_field=arguments.json_key)
    manifest = train_tokenizer(inputs, Path(arguments.out), **options)
    rows = {"documents": manifest["num_documents"], "text": bytes_text(manifest["num_text_bytes"])}
    print_summary(f"train-tokenizer: {arguments.out}", rows | {"tokens": manifest["vocab_size"]})
    print(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {shlex.quote(str(arguments.out))}")


@command("data mix", "prepare and tokenize the sources of a mixture, with weights and a datasheet")
@takes(
    arg("mixture", "YAML file that defines the mixture", Path),
    arg("--name", "name of the mixture (default: the YAML file's name)"),
    data.DATA_DIR,
    flag("--start-over", "keep the downloads, but create everything else again"),
    repeated("--start-over-source NAME", "name of a source to create again (repeatable)"),
    data.DOWNLOAD_AGAIN,
    flag("--dry-run", "print file count, disk space and expected time of each source; write nothing"),
    data.MEMORY,
    group(
        "execution",
        *execution("number of chunks per source (default: one per input file, at most 64)"),
        data.SHUFFLE_TASKS,
    ),
)
def run_mix(arguments: argparse.Namespace) -> int:
    """Downloads, filters, shuffles and tokenizes the sources of a mixture.yaml (docs/corpus.md), computes
    their weights, and writes token files and datasheet.md to DATA_DIR/NAME. Repeat the command to resume.
    Exit code 75: SLURM jobs are under way.
    """
    from moe_exp.data.mixture import Mixing, mix, read_mixture
    from moe_exp.data.prepare import Preparation, plan

    names = ("data_dir", "shuffle_tasks", "start_over", "download_again")
    every = Preparation(
        "",
        execution=execution_of(arguments),
        shuffle={"memory_bytes": arguments.memory},
        **{name: getattr(arguments, name) for name in names},
    )
    mixing = Mixing(
        arguments.name or arguments.mixture.stem,
        read_mixture(arguments.mixture),
        every,
        arguments.tasks,
        start_over_sources=tuple(arguments.start_over_source),
        workers=arguments.workers or os.cpu_count() or 1,
    )
    if arguments.dry_run:
        preparations = mixing.preparations()
        mixing.tokenizer()  # raises if it cannot be loaded
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


@command("data push", "copy a finished output to an object store (s3://, gs://, hf://)")
@takes(
    arg("path", "folder with manifest.json, or prefix of token files", Path),
    arg("url", "folder in the object store, such as s3://bucket/corpus"),
)
def run_push(arguments: argparse.Namespace) -> None:
    """Copies the files of a finished output. The manifest is copied last and marks the copy as complete.
    Repeat the command to copy remaining files. To train on pushed token files, set TRAIN_DATA=URL/PREFIX.
    """
    from moe_exp.data.download.stores import push

    print(f"complete: {push(arguments.path, arguments.url)}")


@command("data pull", "copy an output from an object store to this machine")
@takes(
    arg("url", "folder in the object store, or prefix of token files in the store"),
    arg("folder", "local folder to copy to", Path),
)
def run_pull(arguments: argparse.Namespace) -> None:
    """Copies a pushed output into a folder and verifies every hash. Repeat the command to resume."""
    from moe_exp.data.download.stores import pull

    paths = pull(arguments.url, arguments.folder)
    print(f"{len(paths)} files are complete in {arguments.folder}")


@command("data inspect", "describe token files or JSONL files: counts, lengths, duplicates, samples")
@takes(
    arg("path", "prefix of .bin/.idx files, JSONL file, or folder that contains such files", Path),
    arg("--tokenizer", "tokenizer.json or its folder, to show samples as text", Path),
    arg("--samples", "number of documents to show", default=3),
    arg("--text-field", "JSONL field that contains the text", default="text"),
    arg("--seq-len", "sequence length (tokens; default: 4096); the report shows the share of documents "
        "that are cut at this length",
        default=4096),
    JSON,
)  # fmt: skip
def run_inspect(arguments: argparse.Namespace) -> None:
    from moe_exp.data.inspection import inspect_path, print_inspection

    options = {"tokenizer": arguments.tokenizer, "text_field": arguments.text_field}
    report = inspect_path(arguments.path, num_samples=arguments.samples, seq_len=arguments.seq_len, **options)
    (print_json if arguments.json else print_inspection)(report)


@command("data verify", "compare files with their manifest, or with another corpus")
@takes(
    arg("path", "folder, prefix or file created by moe-exp data", Path),
    arg(
        "--against OTHER",
        "corpus to compare with, instead of the manifest; the order of documents does not matter",
        Path,
    ),
    arg("--text-field", "with --against: JSONL field that contains the text", default="text"),
)
def run_verify(arguments: argparse.Namespace) -> int:
    from moe_exp.data.verification import compare, verify

    code = 0
    other, field = arguments.against, arguments.text_field
    # print each finding at once: verifying the next file may take minutes
    for finding in [compare(arguments.path, other, text_field=field)] if other else verify(arguments.path):
        print(f"{finding.name}: {finding.problem or 'ok, ' + finding.facts}", flush=True)
        code |= bool(finding.problem)
    return code
