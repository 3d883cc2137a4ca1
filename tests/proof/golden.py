"""The golden record: what the package computes, writes and prints, in golden.json.

    python tests/proof/golden.py --check            # compares everything, in about 15 minutes
    python tests/proof/golden.py --check --short    # compares what tests/proof/test_golden.py does
    python tests/proof/golden.py --check --only data --only usage
    python tests/proof/golden.py --write            # writes golden.json again, after an intended change

`--check` prints each entry that differs, and exits with 1 if there is one. An entry is a list: of numbers,
compared bit for bit, or of lines. The parts are the functions of golden_parts.py.

Another type of CPU adds numbers in another order. There computed numbers are compared within LIMITS, and
other entries that depend on them (hashes, counts, tables) are skipped. With another version of Python, torch
or megatron-core nothing is compared, and the exit code is 2.

golden_run.tar.xz holds a run that an earlier commit stopped after 4 of its 6 iterations. `--make-run` writes
it again with the current code. Do that only if runs of earlier commits can no longer be resumed.
"""

import argparse
import difflib
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Processes that the parts start import this file again: torch and the package are imported in functions.
HERE = Path(__file__).resolve().parent
RECORD = HERE / "golden.json"
PARTS = ("usage", "printed", "sbatch", "data", "old_run", "families", "run", "studies", "train")
SHORTENED = ("train", "families", "studies")
# Entries that depend on sums of floating-point numbers.
COMPUTED = re.compile(r"(train|run|families|studies)/|old_run/resumed/")
# With another type of CPU: largest relative difference of a number, by a word of its name.
LIMITS = {"bf16": 2e-2, "": 1e-5}
_MOST_LINES = 20

Entries = Mapping[str, list[Any]]


def versions() -> dict[str, str]:
    """What has to be the same for a comparison."""
    import torch

    python = platform.python_version().rpartition(".")[0]
    return {"python": python, "torch": torch.__version__, "megatron-core": version("megatron-core")}


def cpu() -> dict[str, str]:
    """What has to be the same for numbers to be the same bit for bit."""
    import torch

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", info, re.MULTILINE))
    return {"capability": torch.backends.cpu.get_cpu_capability(), "processor": platform.processor(), **found}


def other_versions(record: Mapping[str, Any]) -> str:
    """Why nothing can be compared, or an empty text."""
    before, now = record["versions"], versions()
    differing = [f"{name} {before[name]}, here {now[name]}" for name in now if before[name] != now[name]]
    return f"golden.json was written with {'; '.join(differing)}" if differing else ""


def entries_of(part: str, *, short: bool) -> dict[str, list[Any]]:
    """The entries of a part by name, computed in a folder that is removed."""
    from proof import golden_parts

    with tempfile.TemporaryDirectory(prefix="golden_") as folder:
        place = golden_parts.Place(Path(folder), short=short)
        return {f"{part}/{name}": values for name, values in getattr(golden_parts, part)(place)}


def compare(part: str, before: Entries, now: Entries, *, short: bool, same_cpu: bool) -> list[str]:
    """A text for every entry of a part that differs."""
    before = {name: values for name, values in before.items() if name.startswith(f"{part}/")}
    missing = [] if short and part in SHORTENED else [name for name in before if name not in now]
    texts = [f"{name}: is no longer there" for name in missing]
    for name, values in now.items():
        if name not in before:
            texts.append(f"{name}: is new")
        elif same_cpu or not COMPUTED.match(name):
            texts += _difference(name, before[name], values, 0.0)
        elif _are_numbers(before[name]):
            limit = next(limit for word, limit in LIMITS.items() if word in name)
            texts += _difference(name, before[name], values, limit)
    return texts


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, float) for value in values)


def _difference(name: str, before: list[Any], now: list[Any], limit: float) -> list[str]:
    if before == now:
        return []
    if not _are_numbers(before + now) or len(before) != len(now):
        lines = [*difflib.unified_diff([*map(str, before)], [*map(str, now)], lineterm="", n=0)][2:]
        lines = [line for line in lines if not line.startswith("@@")]
        more = [f"... and {len(lines) - _MOST_LINES} lines more"] if len(lines) > _MOST_LINES else []
        return ["\n    ".join([f"{name}: differs", *lines[:_MOST_LINES], *more])]
    distances = [abs(new - old) / (abs(old) or 1.0) for old, new in zip(before, now, strict=True)]
    over = [number for number, distance in enumerate(distances) if not distance <= limit]
    if not over:
        return []
    change = f"{before[over[0]]!r} -> {now[over[0]]!r}"
    largest = f"relative {max(distances):.1e} at most, limit {limit:g}"
    return [f"{name}: {len(over)} of {len(now)} differ, the first is [{over[0]}]: {change}; {largest}"]


def main() -> int:
    """Checks or writes the record; returns the exit code."""
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare with golden.json")
    action.add_argument("--write", action="store_true", help="write golden.json")
    action.add_argument("--make-run", action="store_true", help="write golden_run.tar.xz")
    parser.add_argument("--short", action="store_true", help="the short form, with --check")
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    if arguments.write and arguments.short:
        parser.error("--short: only with --check")
    if arguments.make_run:
        from proof import golden_parts

        golden_parts.make_run()
        return 0
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"entries": {}}
    here = {"versions": versions(), "cpu": cpu()}
    same_cpu = record.get("cpu") == here["cpu"]
    if arguments.check and (why := other_versions(record)):
        print(why)
        return 2
    if arguments.write and not (same_cpu and record["versions"] == here["versions"]):
        # Texts are the same on every CPU, so they may be written beside the numbers of another one.
        if any(COMPUTED.match(f"{part}/resumed/") for part in arguments.only or PARTS):
            if arguments.only:
                rule = "golden.json is of another CPU or other versions"
                parser.error(
                    f"--only: {rule}. Fix: write all parts, or usage, printed, sbatch and data only."
                )
            record = {"entries": {}}
        elif record["versions"] != here["versions"]:
            parser.error(other_versions(record))
        else:
            here = {name: record[name] for name in here}
    if arguments.check and not same_cpu:
        print(
            f"golden.json is of another CPU, {record['cpu']}: computed numbers are compared within {LIMITS}"
        )
    texts = []
    for part in arguments.only or PARTS:
        start = time.monotonic()
        found = entries_of(part, short=arguments.short)
        print(f"{part}: {len(found)} entries, {time.monotonic() - start:.0f} s", flush=True)
        if arguments.check:
            texts += compare(part, record["entries"], found, short=arguments.short, same_cpu=same_cpu)
            continue
        others = {name: kept for name, kept in record["entries"].items() if not name.startswith(f"{part}/")}
        record = {**here, "entries": dict(sorted((others | found).items()))}
        RECORD.write_text(json.dumps(record, indent=0, ensure_ascii=False) + "\n")
    print(*texts, f"{len(texts)} entries differ" if arguments.check else f"wrote {RECORD}", sep="\n")
    return int(bool(texts))


if __name__ == "__main__":
    sys.exit(main())
