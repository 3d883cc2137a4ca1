"""`moe-exp ckpt ...`: shows, verifies, rewrites, averages, compares, removes and shrinks checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_exp.commands.guard import add_command, add_json, add_subcommands, print_json

if TYPE_CHECKING:
    from moe_exp.checkpoint.tools.diff import Comparison

# The library is imported by the commands that use it: `moe-exp --help` answers at once.
_PATH_HELP = "an iter_ folder, a checkpoints folder or a run folder"
_SIZES = ("tp", "pp", "vpp", "ep", "etp")  # that `ckpt reshape` once wrote for


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "inspect, verify, rewrite, average, compare and remove checkpoints"
    commands = add_subcommands(subparsers.add_parser("ckpt", help=about), "ckpt")
    for add in (_add_info, _add_verify, _add_reshape, _add_average, _add_diff, _add_prune, _add_shrink):
        add(commands)


def _add_path(parser: argparse.ArgumentParser, name: str = "path", help: str = _PATH_HELP) -> None:
    parser.add_argument(name, type=Path, help=help)


def _add_iteration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--iteration", type=int, metavar="N", help="of the checkpoint (default: the newest)")


def _add_info(subparsers: Any) -> None:
    parser = add_command(subparsers, "info", _info, "show what a checkpoint holds, without reading tensors")
    _add_path(parser)
    about = "list tensors, all or those like '*router*'"
    parser.add_argument("--tensors", nargs="?", const="*", metavar="PATTERN", help=about)
    _add_iteration(parser)
    add_json(parser)


def _info(arguments: argparse.Namespace) -> None:
    from moe_exp.checkpoint.format import folders
    from moe_exp.checkpoint.tools import info

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


def _add_verify(subparsers: Any) -> None:
    about = "verify checksums, structure and optimizer state of a checkpoint"
    parser = add_command(subparsers, "verify", _verify, about)
    _add_path(parser)
    parser.add_argument("--finite", action="store_true", help="also look for values that are not finite")
    _add_iteration(parser)
    add_json(parser)


def _verify(arguments: argparse.Namespace) -> int:
    from moe_exp.checkpoint.integrity import Verification
    from moe_exp.checkpoint.tools.info import chosen

    work = Verification(chosen(arguments.path, arguments.iteration), finite=arguments.finite)
    texts, num_of_cause = list[str](), Counter[str]()
    if not work.has_checksums and not arguments.json:
        why = "has no manifest.json, so there are no checksums of its files to compare"
        print(f"{work.folder}: {why}", flush=True)
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


def _add_reshape(subparsers: Any) -> None:
    about = "rewrite a checkpoint with other keys, another dtype or the weights only"
    parser = add_command(subparsers, "reshape", _reshape, about)
    _add_path(parser, "source", _PATH_HELP)
    _add_path(parser, "target", "the checkpoints folder that is made")
    add = parser.add_argument
    for name in _SIZES:
        add(f"--{name}", help=argparse.SUPPRESS)
    about = "leave out optimizer, schedule, random streams and progress"
    add("--weights-only", action="store_true", help=about)
    add("--dtype", choices=("bf16", "fp32"), help="type of the weights (default: as it is)")
    about = "one key for all layers, or one for each (default: as it is)"
    add("--layers", choices=("stacked", "single"), help=about)
    about = "one key for all experts, or one for each (default: as it is)"
    add("--experts", choices=("stacked", "single"), help=about)
    _add_iteration(parser)


def _reshape(arguments: argparse.Namespace) -> None:
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


def _add_average(subparsers: Any) -> None:
    about = "average the weights of checkpoints, in place of a decay of the learning rate"
    parser = add_command(subparsers, "average", _average, about)
    add = parser.add_argument
    about = "iter_ folders, or checkpoints or run folders, which stand for all of theirs; the oldest first"
    add("sources", type=Path, nargs="+", metavar="source", help=about)
    _add_path(parser, "target", "the checkpoints folder that is made, without optimizer")
    about = "the newest N of each folder (default: all; with --ema: 1)"
    add("--last", type=int, default=0, metavar="N", help=about)
    about = "take the averages that the run has kept by EMA_DECAY in place of the weights"
    add("--ema", action="store_true", help=about)
    about = (
        "the decay whose place it takes: uniform (linear), 1-sqrt, cosine, inverse-sqrt; or ema; or numbers"
        " as 1,2,3 (default: uniform)"
    )
    add("--weights", default="uniform", metavar="NAME", help=about)
    about = "with ema: the weight of a checkpoint over that of the next (default: 0.9)"
    add("--ema-decay", type=float, default=0.9, metavar="X", help=about)
    add_json(parser)


def _average(arguments: argparse.Namespace) -> None:
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


def _add_diff(subparsers: Any) -> None:
    about = "compare two checkpoints name by name, in any layout and format"
    parser = add_command(subparsers, "diff", _diff, about)
    _add_path(parser, "a", _PATH_HELP)
    _add_path(parser, "b", "the other one, which differences are relative to")
    add = parser.add_argument
    add("--optimizer", action="store_true", help="compare the state of the optimizer, too")
    add("--top", type=int, default=10, metavar="N", help="tensors to show, the worst first (default: 10)")
    about = "exit code 0 up to this ||a-b||/||b|| of a tensor (default: 0)"
    add("--rtol", type=float, default=0.0, metavar="X", help=about)
    add_json(parser)


def _diff(arguments: argparse.Namespace) -> int:
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


def _add_prune(subparsers: Any) -> None:
    parser = add_command(subparsers, "prune", _prune, "remove old checkpoints of a run")
    _add_path(parser, help="a checkpoints folder or a run folder")
    add = parser.add_argument
    add("--keep-last", type=int, required=True, metavar="N", help="keep the newest N")
    about = "keep those whose iteration is a multiple of N"
    add("--keep-every", type=int, default=0, metavar="N", help=about)
    add("--keep-best", type=int, default=0, metavar="N", help="keep the N with the lowest validation loss")
    add("--dry-run", action="store_true", help="say what would go, and remove nothing")
    add_json(parser)


def _prune(arguments: argparse.Namespace) -> None:
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


def _add_shrink(subparsers: Any) -> None:
    about = "rewrite torch.save files that store more than their tensors"
    parser = add_command(subparsers, "shrink", _shrink, about)
    _add_path(parser, help="a torch.save file, or a folder to search for such files")
    add = parser.add_argument
    about = "names of files in a folder (default: *.pt *.pth *.bin)"
    add("--pattern", action="append", metavar="GLOB", help=about)
    add("--no-recursive", action="store_true", help="leave out folders in the folder")
    add("--dry-run", action="store_true", help="print what would be gained, and write nothing")
    add("--out", type=Path, metavar="DIR", help="write the smaller files there instead of in their places")
    add_json(parser)


def _shrink(arguments: argparse.Namespace) -> int:
    from moe_exp.checkpoint.format.folders import holds_checkpoints
    from moe_exp.checkpoint.tools.shrink import PATTERNS, shrink, torch_files

    path, found = arguments.path, []
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
