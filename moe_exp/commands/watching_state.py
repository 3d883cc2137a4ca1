"""`moe-exp watch diff` and `storage`: what a run has written, and what it will write."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

# The library is imported by the commands that use it: `moe-exp --help` answers at once.


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds them to `moe-exp watch`."""
    _add_diff(commands)
    _add_storage(commands)


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("diff", help="compare two checkpoints, or the dumps of two ranks or runs, name by name")
    parser.add_argument("a", type=Path, help="a checkpoint (an iter_ folder, a checkpoints folder, a run folder), or a dump (DUMP_ITERS)")
    parser.add_argument("b", type=Path, help="the other one, which errors are relative to")
    parser.add_argument("--weights-only", action="store_true", help="of checkpoints: leave out the optimizer's state")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="tensors to show, the largest relative error first (default: 20)")
    parser.add_argument("--rtol", type=float, default=0.0, metavar="X", help="relative errors up to it do not count (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=_diff)


def _diff(arguments: argparse.Namespace) -> int:
    from moe_exp.checkpoint.tools.diff import compare
    from moe_exp.checkpoint.tools.info import chosen
    from moe_exp.checkpoint.tools.tables import print_comparison

    a, b, top = arguments.a, arguments.b, arguments.top
    if top < 0:
        raise ValueError(f"TOP={top}: must not be negative. Fix: give the number of tensors to show, or 0.")
    for name, path in (("A", a), ("B", b)):
        if not path.exists():
            raise ValueError(f"{name}={path}: is not there. Fix: name a checkpoint or a dump.")
        if dumps := sorted(path.glob("iter_*/rank_*.safetensors")):
            raise ValueError(f"{name}={path}: holds the dumps of several iterations. Fix: name one of them, as {dumps[-1].parent}.")
    if a.suffix == ".safetensors" or any(a.glob("rank_*.safetensors")):
        from moe_exp.training.dumps import compare_dumps

        found = compare_dumps(a, b)
    else:
        found = compare(chosen(a), chosen(b), optimizer=not arguments.weights_only)
    worst, is_within = found.worst(max(1, top)), found.is_within(arguments.rtol)
    if arguments.json:
        counts = {"num_tensors": len(found.tensors), "num_equal": found.num_equal, "ok": is_within}
        print(json.dumps(asdict(found) | {"tensors": [asdict(one) for one in worst[:top]]} | counts, default=str))
        return int(not is_within)
    print_comparison(found, top=top)
    if not found.tensors:
        print("NOTHING TO COMPARE: they have no tensor in common")
    elif is_within:
        print(f"THE SAME, up to relative errors of {arguments.rtol:g}" if worst else "THE SAME, in every value of every tensor")
    else:
        what = f"most in {worst[0].name}, by {worst[0].relative:.3g}" if worst else "in what they hold"
        print(f"DIFFERENT: {what}")
    return int(not is_within or not found.tensors)


def _add_storage(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("storage", help="how often to save, by measured times, and the room that a run needs until its end")
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder, or a file of settings like its config.yaml")
    parser.add_argument("--mtbf", type=float, metavar="HOURS", help="mean time between failures of one node (default: by the run's events)")
    parser.add_argument("--nodes", type=int, metavar="N", help="that fail independently (default: NNODES of the run)")
    parser.add_argument("--save-seconds", type=float, metavar="S", help="of one save (default: as measured)")
    parser.add_argument("--iteration-seconds", type=float, metavar="S", help="of one iteration (default: as measured)")
    parser.add_argument("--restart-seconds", type=float, metavar="S", help="from a failure to the next iteration (default: as measured)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=_storage)


def _storage(arguments: argparse.Namespace) -> int:
    from moe_exp.host.progress import print_summary
    from moe_exp.runs.run_folder import RunFolder, existing_place
    from moe_exp.watch.storage import rows_of, save_advice, storage_of

    positive = ("mtbf", "nodes", "save_seconds", "iteration_seconds", "restart_seconds")
    for name in positive:
        if (value := getattr(arguments, name)) is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name.upper()}={value:g}: must be a positive number. Fix: give one, or leave it out.")
    found = storage_of(arguments.run_folder)
    given = {name: getattr(arguments, name) for name in positive[2:4] if getattr(arguments, name) is not None}
    advice = save_advice(
        found.config.save_interval,
        replace(found.measured, **given),
        mtbf_hours=arguments.mtbf,
        num_nodes=arguments.nodes or found.config.nnodes,
        restart_seconds=arguments.restart_seconds,
    )
    place = arguments.run_folder if arguments.run_folder.is_dir() else existing_place(RunFolder.of(found.config).path)
    free_bytes = shutil.disk_usage(place).free
    if arguments.json:
        values = {"free_bytes": free_bytes, "needed_bytes": found.use.needed_bytes, **asdict(found.use)}
        print(json.dumps(values | {"measured": asdict(found.measured), "advice": asdict(advice) if advice else None}))
    else:
        print_summary(str(arguments.run_folder), rows_of(found, advice, free_bytes))
    return int(free_bytes < found.use.needed_bytes)
