"""Arguments of the benchmarks that are read by argparse: what cannot be is said in one line, with exit code
2, before any work.
"""

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

Number = TypeVar("Number", int, float)


def at_least(smallest: Number) -> Callable[[str], Number]:
    """A reader of numbers of the type of `smallest`."""

    def read(text: str) -> Number:
        try:
            number = type(smallest)(text)
        except ValueError:
            number = None
        if number is None or not smallest <= number < float("inf"):
            kind = "a whole number" if isinstance(smallest, int) else "a number"
            raise ArgumentTypeError(
                f"{text}: has to be {kind} from {smallest} on. Fix: give such as {smallest + 10}"
            )
        return number

    return read


def device(text: str) -> torch.device:
    """cpu, cuda or cuda:1, which is there."""
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ArgumentTypeError(
            f"{text}: is no device of these benchmarks. Fix: give cpu, cuda, or such as cuda:1"
        )
    if kind == "cuda" and int(index or 0) >= (found := torch.cuda.device_count()):
        raise ArgumentTypeError(
            f"{text}: torch sees {found} CUDA devices. Fix: give {'cuda:0' if found else 'cpu'}"
        )
    return torch.device(text)


def result_file(text: str) -> Path:
    """A file that can be written when there are results."""
    path = Path(text)
    if not path.parent.is_dir():
        raise ArgumentTypeError(
            f"{text}: there is no folder {path.parent}. Fix: make it, or give another file"
        )
    if path.is_dir():
        raise ArgumentTypeError(f"{text}: is a folder. Fix: give a file in it")
    return path
