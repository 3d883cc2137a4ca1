"""Prints the results of `moe-exp ckpt`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_exp.checkpoint.tools.diff import Comparison
from moe_exp.host.files import bytes_text
from moe_exp.host.progress import print_summary


def print_info(report: Mapping[str, Any]) -> None:
    """Prints the known facts of `info.describe`."""
    parameters = dict(report["parameters"])
    total = parameters.pop("total")
    rows = {
        "iteration": report["iteration"],
        "written by": report["written_by"],
        "samples": report["samples"],
        "tokens": report["tokens"],
        "model": report["model"],
        "parameters": f"{total:,} ({', '.join(f'{name} {count:,}' for name, count in parameters.items())})",
        "type of the weights": ", ".join(report["dtypes"]),
        "optimizer": (
            ": ".join(filter(None, [report["optimizer_setting"], ", ".join(report["optimizer"])]))
            if report["optimizer"]
            else "no"
        ),
        "saved at": _pairs(report["layout"]),
        "keys": _pairs(report["styles"]),
        "size": (
            f"{report['num_bytes']:,} bytes ({bytes_text(report['num_bytes'])}) in"
            f" {report['num_files']} files"
        ),
        "format": report["format"] + (", with checksums" if report["checksums"] else ", without checksums"),
        "validation loss": report["valid_loss"],
        "versions": _pairs(report["versions"]),
        "schedule": _pairs(report["schedule"]),
        "data": _pairs(report["data"]),
    }
    print_summary(report["path"], {name: value for name, value in rows.items() if value is not None})


def print_checkpoints(checkpoints: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Prints the checkpoints of a folder, one per line."""
    print(f"{len(found)} checkpoint{'' if len(found) == 1 else 's'} in {checkpoints}")
    for one in found:
        print(
            f"  iteration {one['iteration']}  {one['num_bytes']:,} bytes "
            f" {one['state']}{'  latest' if one['latest'] else ''}"
        )


def print_tensors(tensors: Sequence[Mapping[str, Any]]) -> None:
    """Prints tensors, one per line, in columns separated by two spaces."""
    for one in tensors:
        print(
            f"{one['name']}  {one['shape']}  {one['dtype']}  {one['num_chunks']} chunks  {one['num_bytes']:,}"
            " bytes"
        )


_LONGEST_VALUE = 80  # characters


def print_comparison(found: Comparison, *, top: int) -> None:
    """Prints the differences of two checkpoints, at most `top` of each kind."""
    for title, names in (("only in A", found.only_in_a), ("only in B", found.only_in_b)):
        for name in names[:top]:
            print(f"{title}: {name}")
        if len(names) > top:
            print(f"{title}: and {len(names) - top} more")
    for name, (a, b) in list(found.shapes.items())[:top]:
        print(f"shape: {name} {list(a)} and {list(b)}")
    for what, pairs in (("setting", found.settings), ("progress", found.progress)):
        for name, values in pairs.items():
            print(f"{what}: {name} {_short(values[0])} and {_short(values[1])}")
    for one in found.worst(top):
        types = one.dtypes[0] if one.dtypes[0] == one.dtypes[1] else " and ".join(one.dtypes)
        equal = f"{one.num_equal:,} of {math.prod(one.shape):,} values equal"
        print(
            f"differs: {one.name}  relative {one.relative:.3g}  max abs {one.max_abs:.3g}  {equal}  {types}"
        )
    differing = len(found.tensors) - found.num_equal
    print(f"{found.num_equal} of {len(found.tensors)} tensors are equal, {differing} differ", end="")
    print(
        f", {len(found.shapes)} have other shapes, {len(found.only_in_a)} are only in A,"
        f" {len(found.only_in_b)} only in B"
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _pairs(values: Mapping[str, Any] | None) -> str | None:
    return ", ".join(f"{name} {value}" for name, value in values.items()) if values else None
