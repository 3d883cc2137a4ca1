"""Shows progress of long steps (a bar on a terminal, else occasional log lines); prints summary tables."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from moe_exp.host.files import bytes_text

logger = logging.getLogger(__name__)


class Advance(Protocol):
    """Reports how many units were just completed; `now` may describe the current unit."""

    def __call__(self, units: int, now: str = "", /) -> None: ...


@contextmanager
def progress(what: str, total: int, *, unit: str = "bytes", done: int = 0) -> Iterator[Advance]:
    """Yields a function that reports completed units; `done` of the `total` units are already complete."""
    # bound now, because a step may redirect sys.stderr to silence a package
    console, counter = Console(file=sys.stderr), _Counter(what, total, unit, done)
    if not console.is_terminal:
        yield counter.log
        logger.info("%s: %s in %.1f s", what, counter.amount(), time.monotonic() - counter.started)
        return
    said, rate = TextColumn("{task.description}"), TextColumn("{task.fields[rate]}")
    columns = (said, BarColumn(), rate, TimeElapsedColumn(), TimeRemainingColumn())
    # rich prints lines of stdout above the bar, unless stdout is redirected to a file
    with Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(what, total=total, completed=done, rate="")

        def advance(units: int, now: str = "", /) -> None:
            counter.done += units
            speed = f"{counter.amount()}, {counter.rate()}" if counter.done > done else ""
            bar.update(task, advance=units, rate=speed, description=f"{what}: {now}" if now else None)

        yield advance


@contextmanager
def progress_of(how_far: Callable[[], int], what: str, total: int, *, unit: str = "bytes") -> Iterator[None]:
    """Shows progress during a `with` block; `how_far`, called every second, returns the completed units."""
    done, stop = how_far(), threading.Event()
    with progress(what, total, unit=unit, done=done) as advance:

        def follow() -> None:
            known, is_last = done, False
            while not is_last:
                # one more poll after the end, so that the last units count
                is_last = stop.wait(1.0)
                now = how_far()
                advance(now - known)
                known = now

        thread = threading.Thread(target=follow, name=f"progress of {what}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


class _Counter:
    def __init__(self, what: str, total: int, unit: str, done: int):
        self.what, self.total, self.unit, self.first, self.done = what, total, unit, done, done
        self.started = self.logged = time.monotonic()

    def amount(self) -> str:
        return f"{self._size(self.done)} of {self._size(self.total)}"

    def rate(self) -> str:
        # excludes units completed by an earlier call
        rate = (self.done - self.first) / max(1e-3, time.monotonic() - self.started)
        if rate < 1 and self.unit != "bytes":
            return f"{60 * rate:.1f} {self.unit}/min"
        return f"{self._size(int(rate))}/s"

    def log(self, units: int, now: str = "", /) -> None:
        self.done += units
        if now:
            logger.info("%s: %s", self.what, now)
        seconds = time.monotonic()
        if seconds - self.logged >= 30.0 and self.done > self.first:
            self.logged = seconds
            left = (self.total - self.done) * (seconds - self.started) / max(1, self.done - self.first)
            logger.info("%s: %s, %s, %.0f s left", self.what, self.amount(), self.rate(), left)

    def _size(self, units: int) -> str:
        return bytes_text(units) if self.unit == "bytes" else f"{units:,} {self.unit}"


def print_table(
    title: str, header: Collection[str], rows: Iterable[Iterable[str]], *, console: Console | None = None,
    left: Collection[str] | None = None, box: Box = HEAVY_HEAD,
) -> None:  # fmt: skip
    """Prints a table of plain strings, by default to standard output. It has no header if `header` is empty.
    `left`: names of left-aligned columns; None: all columns.
    """
    table = Table(title=title, title_justify="left", show_header=bool(header), box=box)
    for name in header:
        is_left = left is None or name in left
        table.add_column(name, justify="left" if is_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    (console or table_console()).print(table)


def print_summary(title: str, rows: Mapping[str, object]) -> None:
    """Prints a table with the results of a step to standard output."""
    texts = {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in rows.items()}
    print_table(title, (), texts.items())


def table_console(file: TextIO | None = None, *, highlight: bool = True) -> Console:
    """Console for `file` (default: standard output); tables written to files or pipes are not wrapped."""
    console = Console(file=file, highlight=highlight)
    # for files and pipes rich assumes 80 columns and would break words
    return console if console.is_terminal else Console(file=file, highlight=highlight, width=1000)
