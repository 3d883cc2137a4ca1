"""`moe-exp ckpt ...` and `moe-exp convert ...`: shows, verifies, rewrites, averages, compares, removes and
shrinks checkpoints, and converts them from and to Hugging Face folders.
"""

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

# The library is imported by the commands that use it: `moe-exp --help` answers at once.
_CHECKPOINT = "an iter_ folder, a checkpoints folder or a run folder"
_PATH = arg("path", _CHECKPOINT, Path)
_ITERATION = arg("--iteration N", "of the checkpoint (default: the newest)", int)
_SIZES = ("tp", "pp", "vpp", "ep", "etp")  # that `ckpt reshape` once wrote for

command("ckpt", "inspect, verify, rewrite, average, compare and remove checkpoints")


@command("ckpt info", "show what a checkpoint holds, without reading tensors")
@takes(
    _PATH,
    arg("--tensors PATTERN", "list tensors, all or those like '*router*'", nargs="?", const="*"),
    _ITERATION,
    JSON,
)
def run_info(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.format import folders
    from moe_exp.checkpoint.tools import info

    # with --iteration only that one is shown
    checkpoints = folders.checkpoints_folder(arguments.path) if arguments.iteration is None else None
    try:
        folder = info.chosen(arguments.path, arguments.iteration)
        report = info.describe(folder)
    except ValueError:
        if checkpoints and not arguments.json:
            # what there is beside the one that cannot be read
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
@takes(_PATH, flag("--finite", "also look for values that are not finite"), _ITERATION, JSON)
def run_verify(arguments: argparse.Namespace) -> int:
    from moe_exp.checkpoint.integrity import Verification
    from moe_exp.checkpoint.tools.info import chosen

    work = Verification(chosen(arguments.path, arguments.iteration), finite=arguments.finite)
    texts, num_of_cause = list[str](), Counter[str]()
    if not work.has_checksums and not arguments.json:
        why = "has no manifest.json, so there are no checksums of its files to compare"
        print(f"{work.folder}: {why}", flush=True)
    # the first of a cause at once, the others as a number: a damaged file may give thousands
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


@command("ckpt reshape", "rewrite a checkpoint with other keys, another dtype or the weights only")
@takes(
    arg("source", _CHECKPOINT, Path),
    arg("target", "the checkpoints folder that is made", Path),
    *(arg(f"--{name}", argparse.SUPPRESS) for name in _SIZES),
    flag("--weights-only", "leave out optimizer, schedule, random streams and progress"),
    arg("--dtype", "type of the weights (default: as it is)", choices=("bf16", "fp32")),
    arg(
        "--layers",
        "one key for all layers, or one for each (default: as it is)",
        choices=("stacked", "single"),
    ),
    arg(
        "--experts",
        "one key for all experts, or one for each (default: as it is)",
        choices=("stacked", "single"),
    ),
    _ITERATION,
)
def run_reshape(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.tools.info import chosen
    from moe_exp.checkpoint.tools.reshape import Reshaping, reshape
    from moe_exp.config import setting_error

    for name in _SIZES:
        if (size := getattr(arguments, name)) is not None:
            rule = "checkpoints are not rewritten for a layout, a run resumes from any under its own"
            raise setting_error(name, size, rule, f"omit --{name}")
    names = ("weights_only", "dtype", "layers", "experts")
    changes = Reshaping(**{name: getattr(arguments, name) for name in names})
    written = reshape(chosen(arguments.source, arguments.iteration), arguments.target, changes)
    print(f"{written.folder}: {written.num_bytes:,} bytes")


@command("ckpt average", "average the weights of checkpoints, in place of a decay of the learning rate")
@takes(
    arg(
        "sources source",
        "iter_ folders, or checkpoints or run folders, which stand for all of theirs; the oldest first",
        Path,
        nargs="+",
    ),
    arg("target", "the checkpoints folder that is made, without optimizer", Path),
    arg("--last N", "the newest N of each folder (default: all; with --ema: 1)", default=0),
    flag("--ema", "take the averages that the run has kept by EMA_DECAY in place of the weights"),
    arg(
        "--weights NAME",
        "the decay whose place it takes: uniform (linear), 1-sqrt, cosine, inverse-sqrt; or ema; or numbers"
        " as 1,2,3 (default: uniform)",
        default="uniform",
    ),
    arg(
        "--ema-decay X",
        "with ema: the weight of a checkpoint over that of the next (default: 0.9)",
        default=0.9,
    ),
    JSON,
)
def run_average(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.tools.reshape import average, sources_of, weights_of
    from moe_exp.config import setting_error

    for path in arguments.sources:
        if (path / "config.json").is_file():
            fix = "average Hugging Face folders with mergekit, or name checkpoints"
            raise setting_error("SRC", path, "is a Hugging Face folder, and no checkpoint", fix)
    sources = sources_of(arguments.sources, last=arguments.last or int(arguments.ema))
    weights = weights_of(arguments.weights, len(sources), ema_decay=arguments.ema_decay)
    written = average(sources, arguments.target, weights, of_ema=arguments.ema)
    if arguments.json:
        parts = [{"path": str(one), "weight": weight} for one, weight in zip(sources, weights, strict=True)]
        print_json({"path": str(written.folder), "num_bytes": written.num_bytes, "sources": parts})
        return
    for source, weight in zip(sources, weights, strict=True):
        print(f"{weight:8.4f}  {source}")
    print(f"{written.folder}: {written.num_bytes:,} bytes")


@command("ckpt diff", "compare two checkpoints name by name, in any layout and format")
@takes(
    arg("a", _CHECKPOINT, Path),
    arg("b", "the other one, which differences are relative to", Path),
    flag("--optimizer", "compare the state of the optimizer, too"),
    arg("--top N", "tensors to show, the worst first (default: 10)", default=10),
    arg("--rtol X", "exit code 0 up to this ||a-b||/||b|| of a tensor (default: 0)", default=0.0),
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
        raise ValueError(f"TOP={top}: must not be negative. Fix: give the number of tensors to show, or 0.")


def show_comparison(found: Comparison, arguments: argparse.Namespace) -> bool:
    """Prints a comparison by --top and --json; returns whether it is within --rtol."""
    from moe_exp.checkpoint.tools.diff import print_comparison

    is_within = found.is_within(arguments.rtol)
    if arguments.json:
        worst = [asdict(tensor) for tensor in found.worst(arguments.top)]
        counts = {"num_tensors": len(found.tensors), "num_equal": found.num_equal, "ok": is_within}
        print_json(asdict(found) | {"tensors": worst} | counts)
    else:
        print_comparison(found, top=arguments.top)
    return is_within


@command("ckpt prune", "remove old checkpoints of a run")
@takes(
    arg("path", "a checkpoints folder or a run folder", Path),
    arg("--keep-last N", "keep the newest N", int, required=True),
    arg("--keep-every N", "keep those whose iteration is a multiple of N", default=0),
    arg("--keep-best N", "keep the N with the lowest validation loss", default=0),
    flag("--dry-run", "say what would go, and remove nothing"),
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


@command("ckpt shrink", "rewrite torch.save files that store more than their tensors")
@takes(
    arg("path", "a torch.save file, or a folder to search for such files", Path),
    arg("--pattern GLOB", "names of files in a folder (default: *.pt *.pth *.bin)", action="append"),
    flag("--no-recursive", "leave out folders in the folder"),
    flag("--dry-run", "print what would be gained, and write nothing"),
    arg("--out DIR", "write the smaller files there instead of in their places", Path),
    JSON,
)
def run_shrink(arguments: argparse.Namespace) -> int:
    from moe_exp.checkpoint.format.folders import holds_checkpoints
    from moe_exp.checkpoint.tools.shrink import PATTERNS, shrink, torch_files

    path, found = arguments.path, []
    # a common mistake: name the commands that make such checkpoints smaller
    if path.is_dir() and holds_checkpoints(path):
        rule = "holds distributed checkpoints, whose files store nothing but their tensors"
        fix = f"moe-exp ckpt reshape {path} TARGET --weights-only leaves out the optimizer"
        fix += f", moe-exp ckpt prune {path} --keep-last N removes old checkpoints"
        raise ValueError(f"PATH={path}: {rule}. Fix: {fix}.")
    for file in torch_files(path, arguments.pattern or PATTERNS, recursive=not arguments.no_recursive):
        inside = file.relative_to(path) if path.is_dir() else Path(file.name)
        target = arguments.out / inside if arguments.out else None
        one = shrink(file, target=target, dry_run=arguments.dry_run)
        found.append(one)
        if one.problem:
            print(f"{file}: left alone, it {one.problem}", file=sys.stderr, flush=True)
        elif not arguments.json:
            sizes = f"{one.before_bytes:,} -> {one.after_bytes:,} bytes"
            print(f"{file}: {sizes if one.gain_bytes else 'nothing to gain'}", flush=True)
    gain, num_shrunk = sum(one.gain_bytes for one in found), sum(one.gain_bytes > 0 for one in found)
    if arguments.json:
        files = [asdict(one) for one in found]
        print_json({"dry_run": arguments.dry_run, "files": files, "gain_bytes": gain})
    else:
        verb = "would be" if arguments.dry_run else "are"
        print(f"{num_shrunk} of {len(found)} files {verb} smaller, by {gain:,} bytes")
    return int(all(one.problem for one in found))


command("convert", "convert checkpoints from and to Hugging Face format")
_DTYPE = arg("--dtype", "of the weights (default: as they are)", choices=("fp32", "bf16", "fp16"))


@command("convert from-hf", "convert a Hugging Face folder to a checkpoint for training")
@takes(
    arg("source SRC", "folder with config.json and safetensors files", Path),
    arg("target DST", "checkpoints folder to make", Path),
    _DTYPE,
    flag("--drop-mtp", "leave out the layers for multi-token prediction"),
    repeated("--ignore-field NAME", "field of config.json that is known to change nothing; may be repeated"),
)
def run_from_hf(arguments: argparse.Namespace) -> None:
    """Writes a checkpoint with the weights of a Hugging Face folder, its tokenizer, and settings.env for the
    run that continues from it. One tensor is in memory at a time. Every tensor has to be used; nothing is
    written otherwise.
    """
    from moe_exp.checkpoint.hf.importing import from_hf

    options = {"dtype": arguments.dtype, "drop_mtp": arguments.drop_mtp}
    done = from_hf(arguments.source, arguments.target, **options, ignore_fields=arguments.ignore_field)
    print(f"{arguments.target}: {done.architecture}, {done.config.dtype}")
    print(*(f"Note: {note}" for note in done.notes), f"Train on from it:\n  {done.command}", sep="\n")


@command("convert to-hf", "convert a checkpoint to a Hugging Face folder")
@takes(
    arg("source SRC", "run folder, checkpoints folder, or that of one iteration; any layout", Path),
    arg("target DST", "folder to make", Path),
    _DTYPE,
    arg(
        "--weights",
        "model: those that the model computes with; main: the fp32 copies of the optimizer (default: model)",
        choices=("model", "main"),
        default="model",
    ),
    arg(
        "--max-shard-size SIZE",
        "of one file; a larger tensor has its own (default: 5GB)",
        memory_bytes,
        default=5 * 10**9,
    ),
    arg("--tokenizer PATH", "folder or tokenizer.json (default: TOKENIZER of the run)", Path),
    arg(
        "--like FOLDER",
        "take generation_config.json, token ids and max_position_embeddings of this Hugging Face folder",
        Path,
    ),
)
def run_to_hf(arguments: argparse.Namespace) -> None:
    """Writes safetensors files, their index, config, generation config, tokenizer and a model card. The
    architecture is the one of transformers that computes what the model computes; where there is none, it
    says what is in the way.
    """
    from moe_exp.checkpoint.hf.exporting import to_hf
    from moe_exp.host.files import bytes_text

    options = {name: getattr(arguments, name) for name in ("dtype", "tokenizer", "like")}
    options |= {"main_weights": arguments.weights == "main", "max_shard_bytes": arguments.max_shard_size}
    done = to_hf(arguments.source, arguments.target, **options)
    print(f"{arguments.target}: {done.architecture}, {bytes_text(done.num_bytes)} of weights")
    for note in done.notes:
        print(f"Note: {note}")
