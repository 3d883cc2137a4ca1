"""`moe-exp ckpt ...` and `moe-exp convert ...`: checkpoint tools and conversion from and to Hugging Face."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from moe_exp.commands.parsers import JSON, arg, command, flag, memory_bytes, print_json, repeated, takes

if TYPE_CHECKING:
    from moe_exp.checkpoint.tools.diff import Comparison

_CHECKPOINT = "iteration folder (iter_*), checkpoints folder or run folder"
_PATH = arg("path", _CHECKPOINT, Path)
_ITERATION = arg("--iteration N", "iteration of the checkpoint (default: the newest)", int)
_SIZES = ("tp", "pp", "vpp", "ep", "etp")  # options of earlier versions of `ckpt reshape`

command("ckpt", "inspect, verify, rewrite, average, compare and delete checkpoints")


@command("ckpt info", "show the contents of a checkpoint without reading tensors")
@takes(
    _PATH,
    arg("--tensors PATTERN", "list all tensors, or only tensors like '*router*'", nargs="?", const="*"),
    _ITERATION,
    JSON,
)
def run_info(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.format import folders
    from moe_exp.checkpoint.tools import info

    # --iteration shows only that checkpoint
    checkpoints = folders.checkpoints_folder(arguments.path) if arguments.iteration is None else None
    try:
        folder = info.chosen(arguments.path, arguments.iteration)
        report = info.describe(folder)
    except ValueError:
        if checkpoints and not arguments.json:
            # list the others, one of which may be readable
            info.print_checkpoints(checkpoints, info.describe_all(checkpoints))
        raise
    tensors = info.describe_tensors(folder, arguments.tensors) if arguments.tensors else []
    if arguments.json:
        report |= {"tensors": tensors} if arguments.tensors else {}
        print_json(report | ({"checkpoints": info.describe_all(checkpoints)} if checkpoints else {}))
        return
    if not arguments.tensors:
        info.print_info(report)
        if checkpoints:
            info.print_checkpoints(checkpoints, info.describe_all(checkpoints))
    info.print_tensors(tensors)


@command("ckpt verify", "verify checksums, structure and optimizer state of a checkpoint")
@takes(_PATH, flag("--finite", "also search tensors for NaN and infinity"), _ITERATION, JSON)
def run_verify(arguments: argparse.Namespace) -> int:
    from moe_exp.checkpoint.integrity import Verification
    from moe_exp.checkpoint.tools.info import chosen

    work = Verification(chosen(arguments.path, arguments.iteration), finite=arguments.finite)
    texts, num_of_cause = list[str](), Counter[str]()
    if not work.has_checksums and not arguments.json:
        print(f"{work.folder}: no manifest.json found; file checksums are not verified", flush=True)
    # print the first problem of each cause and count the rest: a damaged file may cause thousands
    for cause, text in work.findings():
        texts.append(text)
        num_of_cause[cause] += 1
        if num_of_cause[cause] == 1 and not arguments.json:
            print(text, flush=True)
    counts = {"files": work.num_files, "tensors": work.num_tensors, "chunks": work.num_chunks}
    if arguments.json:
        head = {"path": str(work.folder), "ok": not texts, "checksums": work.has_checksums}
        print_json(head | counts | {"findings": texts})
        return int(bool(texts))
    for cause, number in num_of_cause.items():
        if number > 1:
            more = f"{number - 1} more problem{'s' if number > 2 else ''}"
            print(f"{cause}: {more}; --json lists {'them' if number > 2 else 'it'}")
    if not texts:
        checked = f"{work.num_files} files, " if work.has_checksums else ""
        print(f"{work.folder}: ok, {checked}{work.num_tensors} tensors in {work.num_chunks} chunks")
    return int(bool(texts))


@command("ckpt reshape", "rewrite a checkpoint with other tensor keys, another dtype or only the weights")
@takes(
    arg("source", _CHECKPOINT, Path),
    arg("target", "checkpoints folder to create", Path),
    *(arg(f"--{name}", argparse.SUPPRESS) for name in _SIZES),
    flag("--weights-only", "omit optimizer, schedule, random states and progress"),
    arg("--dtype", "data type of the weights (default: unchanged)", choices=("bf16", "fp32")),
    *(
        arg(f"--{one}s", f"style of tensor keys; stacked: one key for all {one}s; single: one per {one} "
            "(default: unchanged)", choices=("stacked", "single"))
        for one in ("layer", "expert")
    ),
    _ITERATION,
)  # fmt: skip
def run_reshape(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.tools.info import chosen
    from moe_exp.checkpoint.tools.reshape import Reshaping, reshape
    from moe_exp.config import setting_error

    for name in _SIZES:
        if (size := getattr(arguments, name)) is not None:
            rule = "checkpoints do not depend on the parallel layout: a run can resume with any layout"
            raise setting_error(name, size, rule, f"omit --{name}")
    names = ("weights_only", "dtype", "layers", "experts")
    changes = Reshaping(**{name: getattr(arguments, name) for name in names})
    written = reshape(chosen(arguments.source, arguments.iteration), arguments.target, changes)
    print(f"{written.folder}: {written.num_bytes:,} bytes")


@command("ckpt average", "average the weights of checkpoints, as a replacement for learning-rate decay")
@takes(
    arg("sources source",
        "iter_ folders, oldest first; a checkpoints folder or run folder stands for all checkpoints in it",
        Path, nargs="+"),
    arg("target", "checkpoints folder to create; holds one checkpoint, without optimizer state", Path),
    arg("--last N", "average the newest N checkpoints per folder (default: all; with --ema: 1)", default=0),
    flag("--ema", "average the stored moving averages of the weights (EMA_DECAY) instead of the weights"),
    arg("--weights NAME", "weights of the checkpoints: uniform (replaces a linear learning rate decay); "
        "1-sqrt, cosine or inverse-sqrt (replaces a decay of that shape); ema (see --ema-decay); or one "
        "number per checkpoint, such as 1,2,3", default="uniform"),
    arg("--ema-decay X", "with --weights ema: each checkpoint gets X times the weight of the next newer "
        "checkpoint", default=0.9),
    JSON,
)  # fmt: skip
def run_average(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.tools.reshape import average, sources_of, weights_of
    from moe_exp.config import setting_error

    for path in arguments.sources:
        if (path / "config.json").is_file():
            fix = "use mergekit to average Hugging Face folders, or pass checkpoint paths"
            raise setting_error("SRC", path, "is a Hugging Face folder, not a checkpoint", fix)
    sources = sources_of(arguments.sources, last=arguments.last or int(arguments.ema))
    weights = weights_of(arguments.weights, len(sources), ema_decay=arguments.ema_decay)
    written = average(sources, arguments.target, weights, of_ema=arguments.ema)
    parts = [{"path": str(one), "weight": weight} for one, weight in zip(sources, weights, strict=True)]
    if arguments.json:
        print_json({"path": str(written.folder), "num_bytes": written.num_bytes, "sources": parts})
        return
    for part in parts:
        print(f"{part['weight']:8.4f}  {part['path']}")
    print(f"{written.folder}: {written.num_bytes:,} bytes")


@command("ckpt diff", "compare two checkpoints tensor by tensor, in any layout and format")
@takes(
    arg("a", _CHECKPOINT, Path),
    arg("b", "reference checkpoint: the relative difference of a tensor is ||a-b||/||b||", Path),
    flag("--optimizer", "also compare the optimizer state"),
    arg("--top N", "number of tensors to show, largest differences first", default=10),
    arg("--rtol X", "exit with code 0 if each tensor's ||a-b||/||b|| is at most X (default: 0)", default=0.0),
    JSON,
)
def run_diff(arguments: argparse.Namespace) -> int:
    from moe_exp.checkpoint.tools.diff import compare
    from moe_exp.checkpoint.tools.info import chosen

    check_top(arguments.top)
    found = compare(chosen(arguments.a), chosen(arguments.b), optimizer=arguments.optimizer)
    return int(not show_comparison(found, arguments))


def check_top(top: int) -> None:
    if top < 0:
        raise ValueError(f"TOP={top}: must not be negative. Fix: set a number of tensors, such as 10.")


def show_comparison(found: Comparison, arguments: argparse.Namespace) -> bool:
    """Prints a comparison as --top and --json specify; returns whether all differences are within --rtol."""
    from moe_exp.checkpoint.tools.diff import print_comparison

    is_within = found.is_within(arguments.rtol)
    if arguments.json:
        worst = [asdict(tensor) for tensor in found.worst(arguments.top)]
        counts = {"num_tensors": len(found.tensors), "num_equal": found.num_equal, "ok": is_within}
        print_json(asdict(found) | {"tensors": worst} | counts)
    else:
        print_comparison(found, top=arguments.top)
    return is_within


@command("ckpt prune", "delete old checkpoints of a run")
@takes(
    arg("path", "checkpoints folder or run folder", Path),
    arg("--keep-last N", "keep the newest N checkpoints", int, required=True),
    arg("--keep-every N", "also keep checkpoints whose iteration is a multiple of N", default=0),
    arg("--keep-best N", "also keep the N checkpoints with the lowest validation loss", default=0),
    flag("--dry-run", "print the checkpoints that would be removed; remove nothing"),
    JSON,
)
def run_prune(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.format.folders import iteration_of, prunable, remove

    kept = {name: getattr(arguments, f"keep_{name}") for name in ("last", "every", "best")}
    found = prunable(arguments.path, **kept)
    word = "would remove" if arguments.dry_run else "removed"
    for folder in found if arguments.dry_run else remove(found):
        if not arguments.json:
            print(f"{word} {folder}: {found[folder]:,} bytes", flush=True)
    num_bytes = sum(found.values())
    if arguments.json:
        removed = [{"iteration": iteration_of(one), "num_bytes": size} for one, size in found.items()]
        print_json({"dry_run": arguments.dry_run, "removed": removed, "num_bytes": num_bytes})
    else:
        print(f"{word} {len(found)} checkpoints, {num_bytes:,} bytes")


@command("ckpt shrink", "rewrite torch.save files that store more bytes than their tensors need")
@takes(
    arg("path", "torch.save file, or a folder to search for such files", Path),
    arg("--pattern GLOB", "file names to search for in a folder (repeatable; default: *.pt *.pth *.bin)",
        action="append"),
    flag("--no-recursive", "do not search subfolders"),
    flag("--dry-run", "print how much smaller the files would be; write nothing"),
    arg("--out DIR", "folder for the rewritten files (default: replace the original files)", Path),
    JSON,
)  # fmt: skip
def run_shrink(arguments: argparse.Namespace) -> int:
    from moe_exp.checkpoint.format.folders import holds_checkpoints
    from moe_exp.checkpoint.tools.shrink import PATTERNS, shrink, torch_files

    path, found = arguments.path, []
    # a common mistake, so name the commands that reduce such checkpoints
    if path.is_dir() and holds_checkpoints(path):
        rule = "contains distributed checkpoints, whose files have no unused bytes to remove"
        fix = f"run moe-exp ckpt reshape {path} TARGET --weights-only to omit the optimizer"
        fix += f", or moe-exp ckpt prune {path} --keep-last N to delete old checkpoints"
        raise ValueError(f"PATH={path}: {rule}. Fix: {fix}.")
    for file in torch_files(path, arguments.pattern or PATTERNS, recursive=not arguments.no_recursive):
        inside = file.relative_to(path) if path.is_dir() else Path(file.name)
        target = arguments.out / inside if arguments.out else None
        one = shrink(file, target=target, dry_run=arguments.dry_run)
        found.append(one)
        if one.problem:
            print(f"{file}: skipped, it {one.problem}", file=sys.stderr, flush=True)
        elif not arguments.json:
            sizes = f"{one.before_bytes:,} -> {one.after_bytes:,} bytes"
            print(f"{file}: {sizes if one.gain_bytes else 'already minimal'}", flush=True)
    gain, num_shrunk = sum(one.gain_bytes for one in found), sum(one.gain_bytes > 0 for one in found)
    if arguments.json:
        files = [asdict(one) for one in found]
        print_json({"dry_run": arguments.dry_run, "files": files, "gain_bytes": gain})
    else:
        verb = "would be" if arguments.dry_run else "are"
        print(f"{num_shrunk} of {len(found)} files {verb} smaller, by {gain:,} bytes")
    return int(all(one.problem for one in found))


command("convert", "convert checkpoints from and to Hugging Face format")
_DTYPE = arg("--dtype", "data type of the weights (default: unchanged)", choices=("fp32", "bf16", "fp16"))


@command("convert from-hf", "convert a Hugging Face folder to a checkpoint for training")
@takes(
    arg("source SRC", "folder with config.json and safetensors files, or hf://OWNER/NAME[@REVISION]"),
    arg(
        "target DST",
        "checkpoints folder to create; if SRC is downloaded, the download is kept beside DST",
        Path,
    ),
    _DTYPE,
    flag("--drop-mtp", "omit the model's layers for multi-token prediction"),
    repeated("--ignore-field NAME", "unknown field of config.json to ignore (repeatable)"),
    flag(
        "--verify",
        "compare the outputs of each layer with those of SRC in transformers (both models in "
        "memory, in fp32)",
    ),
)
def run_from_hf(arguments: argparse.Namespace) -> int:
    """Converts a Hugging Face folder to a checkpoint, copies its tokenizer, and writes settings.env for a run
    that starts from this checkpoint. Only one tensor is in memory at a time. If a tensor would not
    be used, fails without writing anything. If SRC is not a local folder, first downloads SRC from the Hub.
    """
    from moe_exp.checkpoint.format.folders import check_target
    from moe_exp.checkpoint.hf.importing import architecture_of, from_hf, settings_of
    from moe_exp.checkpoint.hf.model_folder import read_json
    from moe_exp.data.download.hub import download_model
    from moe_exp.data.download.sources import model_source

    if arguments.verify:
        from moe_exp.inference.model import check_transformers, compare

        check_transformers()
    source, origin, ignored = Path(arguments.source), "", arguments.ignore_field

    def check(folder: Path) -> None:  # before gigabytes are downloaded
        fields = read_json(folder / "config.json")
        settings_of(fields, architecture_of(fields), ignore=ignored)

    if model := model_source(arguments.source):
        check_target(arguments.target)
        source, origin = download_model(model, arguments.target.parent, check)
    options = {"dtype": arguments.dtype, "drop_mtp": arguments.drop_mtp, "origin": origin}
    done = from_hf(source, arguments.target, **options, ignore_fields=ignored)
    print(f"{arguments.target}: {done.architecture}, {done.config.dtype}{origin and f', from {origin}'}")
    print(*(f"Note: {note}" for note in done.notes), f"Train further with:\n  {done.command}", sep="\n")
    if not arguments.verify:
        return 0
    lines, agrees = compare(source, arguments.target)
    print(*lines, sep="\n")
    return 0 if agrees else 1


@command("convert to-hf", "convert a checkpoint to a Hugging Face folder")
@takes(
    arg("source SRC", "run folder, checkpoints folder or iter_ folder, with any parallel layout", Path),
    arg("target DST", "Hugging Face folder to create", Path),
    _DTYPE,
    arg("--weights", "model: the model's own weights; main: the optimizer's fp32 main weights",
        choices=("model", "main"), default="model"),
    arg("--max-shard-size SIZE", "maximum size of a file; a larger tensor gets its own file (default: 5GB)",
        memory_bytes, default=5 * 10**9),
    arg("--tokenizer PATH", "tokenizer folder or tokenizer.json (default: TOKENIZER of the run)", Path),
    arg("--like FOLDER",
        "Hugging Face folder that provides generation_config.json, token ids and max_position_embeddings",
        Path),
)  # fmt: skip
def run_to_hf(arguments: argparse.Namespace) -> None:
    """Writes safetensors files, their index, config, generation config, tokenizer and a model card. Chooses
    the transformers architecture that is equivalent to the model. If no architecture is equivalent, prints
    the settings that prevent the export.
    """
    from moe_exp.checkpoint.hf.exporting import to_hf
    from moe_exp.host.files import bytes_text

    options = {name: getattr(arguments, name) for name in ("dtype", "tokenizer", "like")}
    options |= {"main_weights": arguments.weights == "main", "max_shard_bytes": arguments.max_shard_size}
    done = to_hf(arguments.source, arguments.target, **options)
    print(f"{arguments.target}: {done.architecture}, {bytes_text(done.num_bytes)} of weights")
    for note in done.notes:
        print(f"Note: {note}")
