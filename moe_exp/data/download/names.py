"""Names that a server lists: whether each is the place of one file inside of the download's folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath

from moe_exp.host.exit_codes import printable


def check_names(names: Collection[str], server: str, reserved: Collection[str]) -> None:
    """Whether every file has a place of its own in a folder.

    Args:
        names: of the files.
        server: that lists them.
        reserved: names of what the download itself keeps in the folder.

    Raises:
        ValueError: one has none.
    """
    known = set(names)
    for name in names:
        check_inside(name, server)
        fix = "leave it out by --pattern, or choose another dataset"
        if (first := name.partition("/")[0]) in reserved:
            raise refused(name, f"{first} is what the download itself keeps there", server, fix)
        if above := known & {str(folder) for folder in PurePosixPath(name).parents}:
            raise refused(name, f"{min(above)} is a file as well", server, fix)


def check_inside(name: str, server: str) -> None:
    """Whether a name that a server lists stays inside of the folder that it is put into, and can be printed.

    Raises:
        ValueError: it does not.
    """
    if printable(name) != name or "\n" in name or "\t" in name:
        raise refused(name, "it has control characters", server)
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise refused(name, "it leads out of the folder of the download", server)
    if any(len(part.encode()) > 255 for part in name.split("/")) or len(name.encode()) > 2000:
        raise refused(name, "it is longer than a file name may be, 255 bytes", server)


def refused(name: str, rule: str, server: str, fix: str = "choose another dataset") -> ValueError:
    """The error about a name."""
    shown = ascii(name)[1:-1]
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    return ValueError(f"{shown}: {server} lists a file of this name, and {rule}. Fix: {fix}.")
