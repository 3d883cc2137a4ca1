"""Do the tests notice? Applies small faults one at a time to a copy of the checkout and runs their tests.

    PYTHONPATH=. python bench/mutants.py                    # all, two at a time; resumes
    PYTHONPATH=. python bench/mutants.py --only layers/     # faults whose file or name contains the text
    PYTHONPATH=. python bench/mutants.py --table            # the results so far

The faults are in bench/mutants/*.yaml: `file`, `fault` (what is wrong), `old` (text that occurs once in the
file), `new`, `tests` (arguments of pytest) and, if these tests cannot see it, `survives` with the reason. A
fault is caught if its tests fail or take ten times as long. If they fail without it, that is an error.
"""

import argparse
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from moe_exp.host.files import read_json, read_yaml, write_json
from moe_exp.report.page import table as markdown_table

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "bench" / "mutants"
MIN_TIMEOUT_SECONDS = 120
SLOWER = 10  # tests that take so many times their usual time hang


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` in `file` becomes `new`."""

    file: str
    fault: str
    old: str
    new: str
    tests: str
    survives: str = ""

    def __post_init__(self) -> None:
        if self.old == self.new:
            raise ValueError(f"{self.file}: {self.fault!r} changes nothing")

    @property
    def name(self) -> str:
        return f"{self.file}: {self.fault}"

    @property
    def key(self) -> str:
        """Changes with the fault, its file and its tests."""
        parts = [self.file, self.old, self.new, self.tests, (ROOT / self.file).read_text()]
        paths = [ROOT / word.partition("::")[0] for word in shlex.split(self.tests)]
        parts += [path.read_text() for path in paths if path.is_file()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def apply(self, root: Path) -> None:
        """Writes the fault into the checkout at `root`.

        Raises:
            ValueError: `old` does not occur exactly once.
        """
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: the text to replace occurs {count} times, it must once: {self.old!r}"
            )
        path.write_text(text.replace(self.old, self.new))


def read_mutants(folder: Path = FAULTS) -> list[Mutant]:
    return [Mutant(**entry) for path in sorted(folder.glob("*.yaml")) for entry in read_yaml(path)]


class Copy:
    """A copy of the checkout in which one thread runs tests."""

    def __init__(self, folder: Path):
        self.root = folder / "checkout"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    def run_tests(self, tests: str, timeout_seconds: float) -> tuple[str, float, str]:
        """`passed`, `failed` or `hung`, the seconds, and the first failure."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            *shlex.split(tests),
        ]
        environment = os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        begin = time.monotonic()
        process = subprocess.Popen(
            command, cwd=self.root, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "hung", time.monotonic() - begin, f"no end after {timeout_seconds:.0f} s"
        seconds = time.monotonic() - begin
        failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if process.returncode in (0, 1, 2) and (process.returncode == 0 or failures):
            return ("failed" if process.returncode else "passed"), seconds, (failures or [""])[0]
        raise RuntimeError(f"pytest {tests} ended with exit code {process.returncode}: {output[-500:]}")


class Results:
    """Results by the key of the mutant, those of earlier calls as well; threads share it.

    Attributes:
        clean_seconds: of tests that passed without a fault in this call; other code may have changed
            since an earlier one.
    """

    def __init__(self, path: Path):
        self.path, self._lock = path, threading.Lock()
        self.clean_seconds: dict[str, float] = {}
        self.entries: dict[str, dict] = read_json(path) if path.exists() else {}

    def add(self, key: str, entry: dict) -> None:
        with self._lock:
            self.entries[key] = entry
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.entries)


def check(mutant: Mutant, copy: Copy, results: Results) -> dict:
    """Runs the tests of one mutant, and once without it."""
    if mutant.tests not in results.clean_seconds:
        outcome, seconds, why = copy.run_tests(mutant.tests, 900)
        if outcome != "passed":
            raise ValueError(f"{mutant.name}: pytest {mutant.tests} fails without the fault: {why}")
        results.clean_seconds[mutant.tests] = seconds
    path = copy.root / mutant.file
    text = path.read_text()
    try:
        mutant.apply(copy.root)
        timeout_seconds = max(SLOWER * results.clean_seconds[mutant.tests], MIN_TIMEOUT_SECONDS)
        outcome, seconds, why = copy.run_tests(mutant.tests, timeout_seconds)
    finally:
        path.write_text(text)
    entry = {
        "name": mutant.name,
        "outcome": "survived" if outcome == "passed" else outcome,
        "seconds": round(seconds, 1),
        "by": why,
    }
    results.add(mutant.key, entry)
    return entry


def results_table(mutants: list[Mutant], results: Results) -> str:
    """Caught and surviving mutants by folder, then every survivor."""
    rows: dict[str, list[int]] = {}
    survivors = []
    for mutant in mutants:
        entry = results.entries.get(mutant.key)
        if entry is None:
            continue
        row = rows.setdefault(str(Path(mutant.file).parent).removeprefix("moe_exp/"), [0, 0, 0])
        survived = entry["outcome"] == "survived"
        row[0] += 1
        row[1] += not survived
        row[2] += survived and bool(mutant.survives)
        if survived:
            survivors.append(f"- {mutant.name}: {mutant.survives or 'NOT EXPLAINED'}")
    total = [sum(column) for column in zip(*rows.values(), strict=True)] or [0, 0, 0]
    lines = [
        (folder, [str(count) for count in row]) for folder, row in [*sorted(rows.items()), ("all", total)]
    ]
    return "\n".join([*markdown_table(["folder", "faults", "caught", "explained"], lines), "", *survivors])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose file or name contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="number of faults at a time")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.json")
    parser.add_argument("--table", action="store_true", help="print the results so far, run nothing")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in read_mutants() if arguments.only in mutant.name]
    results = Results(arguments.results)
    todo = [mutant for mutant in mutants if mutant.key not in results.entries and not arguments.table]
    copies: Queue[Copy] = Queue()
    errors = []

    def work(mutant: Mutant) -> None:
        copy = copies.get()
        try:
            entry = check(mutant, copy, results)
            print(
                f"{entry['outcome']:8}  {mutant.name}  ({entry['seconds']:.0f} s) {entry['by']}", flush=True
            )
        except (ValueError, RuntimeError) as error:
            errors.append(str(error))
            print(f"error     {error}", flush=True)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory(prefix="mutants_") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for index in range(arguments.jobs if todo else 0):
            copies.put(Copy(Path(folder, str(index))))
        list(pool.map(work, todo))
    print(results_table(mutants, results))
    if errors:
        sys.exit(f"{len(errors)} faults could not be checked")


if __name__ == "__main__":
    main()
