"""Runs the ranks that use a model: this process alone, or those of a torchrun job."""

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from moe_exp.config import Config
from moe_exp.engine import faults, runtime
from moe_exp.engine.runtime import Runtime
from moe_exp.host.progress import progress

T = TypeVar("T")
_BATCH_BYTES = 256 << 20  # of logits, if no batch size is given


class Request:
    """Base of the dataclasses that describe a job; its ranks read them from a JSON file."""

    @classmethod
    def read(cls: type[T], file: str) -> T:
        """Reads a file with the text of `to_json`."""
        return TypeAdapter(cls).validate_json(Path(file).read_text(encoding="utf-8"))

    def to_json(self: Any) -> str:
        return json.dumps(asdict(self))


def batch_size_of(saved: Config, seq_len: int, most: int, *, capacity: bool) -> int:
    """Default batch size: with `capacity` the training's, else by the bytes of the logits."""
    return saved.mbsz if capacity else max(1, min(most, _BATCH_BYTES // (4 * seq_len * saved.vocab_size)))


def advancing(
    what: str, total: int, unit: str, *, shows: bool
) -> AbstractContextManager[Callable[[int], None]]:
    """Progress bar on the rank that shows one; yields a function that takes the units just done."""
    return progress(what, total, unit=unit) if shows else nullcontext(lambda count: None)


def run_alone(config: Config, work: Callable[[Runtime], None]) -> None:
    """Runs `work` in this process, as the only rank."""
    rank = runtime.start_alone(config)
    try:
        work(rank)
    finally:
        runtime.stop()


def run_rank(config: Config, work: Callable[[Runtime], None]) -> None:
    """Runs `work` as a rank of a torchrun job; a ValueError prints one line and exits with 1."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_exp").setLevel(logging.INFO if os.environ.get("RANK") == "0" else logging.WARNING)
    with faults.stop_signal() as stop, faults.named_by_rank(stop):
        try:
            work(runtime.start(config))
        except ValueError as error:
            print(f"moe-exp: {error}", file=sys.stderr, flush=True)
            # skips the clean-up of process groups, which would wait for other ranks
            os._exit(1)
        runtime.stop()


def planned_quietly(plan: Callable[[], T]) -> T:
    """Result of `plan`, without logging: the launcher, which planned the same, has logged already."""
    logging.getLogger("moe_exp").setLevel(logging.ERROR)
    return plan()
