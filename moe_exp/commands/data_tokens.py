"""`moe-exp data tokenize`, `train-tokenizer` and `mix`: from documents to token files; of finished outputs
`push`, `pull`, `inspect` and `verify`.
"""

import argparse
import logging
import os
import shlex
import time
from pathlib import Path

from moe_exp.commands.data import TEXT_DOCUMENTS, execution, execution_of, under_way
from moe_exp.commands.parsers import JSON, arg, command, flag, group, memory_bytes, one_of, print_json, takes
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

_SKIP_BAD = flag("--skip-bad", "skip and count bad lines instead of stopping at the first")
_START_OVER = flag("--start-over", "make it again, and replace what is there")


@command("data tokenize", "files of documents to Megatron's .bin/.idx, or token files of shards into one")
@takes(
    one_of(
        arg("--input PATH", f"files, folders or quoted patterns: {KINDS}", nargs="+"),
        arg("--merge PREFIX", "token files of shards, in order, to join into --output-prefix", nargs="+"),
        required=True,
    ),
    arg("--output-prefix", "path without suffix; --merge takes it as it is", required=True),
    arg("--json-keys KEY", "fields to tokenize, each into files of its own", nargs="+", default=["text"]),
    arg("--tokenizer-type", "Megatron's name of it", choices=TOKENIZER_TYPES),
    arg("--tokenizer-model", "folder, tokenizer.json, name on the hub, or SentencePiece .model"),
    arg("--vocab-file", "vocab.json of GPT2BPETokenizer"),
    arg("--merge-file", "merges.txt of GPT2BPETokenizer"),
    flag("--append-eod", "end every document with the end-of-document token"),
    flag("--prepend-bos", "begin every document with the tokenizer's BOS"),
    arg("--eod-token", "which one that is, where the tokenizer's files do not say"),
    flag("--allow-special", "read special tokens that occur in a text as such; they are text otherwise"),
    arg(
        "--backend",
        "gigatoken, where it gives the same (auto), or the slower packages",
        choices=BACKENDS,
        default="auto",
    ),
    TEXT_DOCUMENTS,
    _SKIP_BAD,
    _START_OVER,
    flag("--dry-run", "tokens, disk and time by a sample; nothing is written"),
    group(
        "where it runs",
        *execution("tasks, on as many cores or machines (default: none, processes of this one)"),
    ),
    group(
        "Megatron's, without effect",
        arg("--partitions", argparse.SUPPRESS, int),
        arg("--log-interval", argparse.SUPPRESS, int),
        flag("--keep-sequential-samples", argparse.SUPPRESS),
        flag("--split-sentences", argparse.SUPPRESS),
        about="parts, order and progress are as they should be without them",
    ),
)
def run_tokenize(arguments: argparse.Namespace) -> int:
    """Documents to PREFIX_text_document.bin/.idx. The same bytes for any --workers and --tasks; a run that
    was killed continues. Exit code 75: SLURM jobs are under way.
    """
    started = time.monotonic()
    if arguments.split_sentences:
        rule = "sentences are for BERT's pairs; a GPT model reads documents"
        raise setting_error("split_sentences", True, rule, "leave it out")
    if arguments.merge:
        prefixes, joined = [Path(prefix) for prefix in arguments.merge], Path(arguments.output_prefix)
        if arguments.dry_run:
            merge_dry_run(prefixes, joined)
            return 0
        facts = merge_token_files(prefixes, joined, start_over=arguments.start_over)
        print_summary("merge", {"documents": facts["num_documents"], "tokens": facts["num_tokens"]})
        print(f"TRAIN_DATA={shlex.quote(str(joined))}")
        return 0
    if arguments.tokenizer_type is None:
        fix = f"give one of {', '.join(TOKENIZER_TYPES)}"
        raise setting_error("tokenizer_type", "", "must be given", fix)
    if not arguments.append_eod:
        logger.warning("without --append-eod nothing marks where a document ends")
    options = {name: getattr(arguments, name) for name in ("vocab_file", "merge_file", "eod_token")}
    options |= {"model": arguments.tokenizer_model, "allow_special": arguments.allow_special}
    tokenizer = load_tokenizer(arguments.tokenizer_type, prepend_bos=arguments.prepend_bos, **options)
    tokenizer.log_left_out()
    execution, code = execution_of(arguments), 0
    # find the inputs of all keys first: tokenizing one may take hours
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


@command("data train-tokenizer", "a byte-level BPE from files of documents, as a folder for AutoTokenizer")
@takes(
    arg("input PATH", f"files, folders or quoted patterns: {KINDS}", nargs="+"),
    arg("--vocab-size", "tokens, special ones and the 256 bytes included", int, required=True),
    arg("--out", "folder", required=True),
    arg("--json-key", "field with the text (default: %(default)s)", default="text"),
    arg("--eos-token", "end-of-document token (default: %(default)s)", default=EOD_TOKEN),
    arg("--bos-token", "beginning-of-document token (default: none)"),
    arg("--pad-token", "padding token (default: none)"),
    arg(
        "--max-megabytes", "of text; of every file the same share (default: %(default)s)", float, default=1000
    ),
    TEXT_DOCUMENTS,
    _SKIP_BAD,
    _START_OVER,
)
def run_train_tokenizer(arguments: argparse.Namespace) -> None:
    """Trains a byte-level BPE. Texts are streamed; memory grows with the number of different words."""
    same = ("vocab_size", "json_key", "eos_token", "bos_token", "pad_token", "skip_bad", "start_over")
    options = {name: getattr(arguments, name) for name in same}
    max_bytes = int(arguments.max_megabytes * 1e6)
    options |= {"max_bytes": max_bytes, "rule": TextRule(arguments.text_documents)}
    inputs = find_inputs(arguments.input, text_field=arguments.json_key)
    manifest = train_tokenizer(inputs, Path(arguments.out), **options)
    rows = {"documents": manifest["num_documents"], "text": bytes_text(manifest["num_text_bytes"])}
    print_summary(f"train-tokenizer: {arguments.out}", rows | {"tokens": manifest["vocab_size"]})
    print(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {shlex.quote(str(arguments.out))}")


@command("data mix", "prepare and tokenize the sources of a mixture, with weights and a datasheet")
@takes(
    arg("mixture", "mixture.yaml", Path),
    arg("--name", "of the mixture (default: the file's name)"),
    arg("--data-dir FOLDER", "(default: data)", Path, default=Path("data")),
    flag("--start-over", "make everything again but the downloads"),
    arg("--start-over-source NAME", "make this source again; may be repeated", action="append", default=[]),
    flag("--download-again", "fetch the files again too"),
    flag("--dry-run", "print files, disk and time of each source, and write nothing"),
    arg(
        "--memory SIZE",
        "of a task of the shuffle, as in 8GB (default: a quarter of what is left for all of them)",
        memory_bytes,
    ),
    group(
        "where the tasks run",
        *execution("number of chunks of a source (default: one per input file, at most 64)"),
        arg(
            "--shuffle-tasks N",
            "tasks of a shuffle (default: 1; on SLURM and Ray as many as chunks if over 50 GB)",
            int,
        ),
    ),
)
def run_mix(arguments: argparse.Namespace) -> int:
    """Downloads, filters, shuffles and tokenizes every source of a mixture.yaml (docs/corpus.md), computes
    their weights, and writes DATA_DIR/NAME with token files and datasheet.md. Called again, it resumes where
    it stopped. Exit code 75: SLURM jobs are under way.
    """
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


@command("data push", "copy what a step has made to an object store (s3://, gs://, hf://)")
@takes(
    arg("path", "folder with manifest.json, or prefix of token files", Path),
    arg("url", "folder at the store, as in s3://bucket/corpus"),
)
def run_push(arguments: argparse.Namespace) -> None:
    """Copies the files of a finished step, and its manifest last: without it they are not complete. Called
    again, it continues with the files that are not there. Training reads token files from there:
    TRAIN_DATA=URL/PREFIX.
    """
    from moe_exp.data.download.stores import push

    print(f"complete: {push(arguments.path, arguments.url)}")


@command("data pull", "copy it back")
@takes(
    arg("url", "folder at the store, or prefix of token files there"), arg("folder", "gets the files", Path)
)
def run_pull(arguments: argparse.Namespace) -> None:
    """Copies what `push` has made into a folder, and compares every hash. Called again, it continues where it
    stopped.
    """
    from moe_exp.data.download.stores import pull

    paths = pull(arguments.url, arguments.folder)
    print(f"{len(paths)} files are complete in {arguments.folder}")


@command("data inspect", "describe token files or JSONL files: counts, lengths, duplicates, samples")
@takes(
    arg("path", "prefix of .bin and .idx, a JSONL file, or a folder of such", Path),
    arg("--tokenizer", "tokenizer.json or a folder with it, to show samples as text", Path),
    arg("--samples", "documents to show (default: 3)", default=3),
    arg("--text-field", "field of JSONL with the text (default: text)", default="text"),
    arg(
        "--seq-len",
        "tokens of a training sample, for the share of documents that it cuts (default: 4096)",
        default=4096,
    ),
    JSON,
)
def run_inspect(arguments: argparse.Namespace) -> None:
    from moe_exp.data.inspection import inspect_path, print_inspection

    options = {"tokenizer": arguments.tokenizer, "text_field": arguments.text_field}
    report = inspect_path(arguments.path, num_samples=arguments.samples, seq_len=arguments.seq_len, **options)
    (print_json if arguments.json else print_inspection)(report)


@command("data verify", "compare files with their manifest, or with another corpus")
@takes(
    arg("path", "a folder, prefix or file that moe-exp data has made", Path),
    arg("--against OTHER", "compare the documents with those of OTHER instead, in whatever order", Path),
    arg("--text-field", "field of JSONL with the text, with --against (default: text)", default="text"),
)
def run_verify(arguments: argparse.Namespace) -> int:
    from moe_exp.data.verification import compare, verify

    code = 0
    other, field = arguments.against, arguments.text_field
    # each is printed as soon as it is known
    for finding in [compare(arguments.path, other, text_field=field)] if other else verify(arguments.path):
        print(f"{finding.name}: {finding.problem or 'ok, ' + finding.facts}", flush=True)
        code |= bool(finding.problem)
    return code
