"""How far a download is: one bar in bytes over all files, instead of huggingface_hub's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_exp.host.progress import progress_of


def silent_bar() -> type:
    """Silent progress bar for `snapshot_download(tqdm_class=...)`."""
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **settings: Any):
            super().__init__(*args, **{**settings, "disable": True})

    return Silent


@contextmanager
def watch(folder: Path, sizes: dict[str, int]) -> Iterator[None]:
    """Shows our bar, from what grows on disk: the library's own progress differs between versions.

    Args:
        folder: `local_dir` of the download.
        sizes: bytes of the files that come, by name.
    """
    with progress_of(lambda: _bytes_so_far(folder, sizes), "download", sum(sizes.values())):
        yield


def _bytes_so_far(folder: Path, sizes: dict[str, int]) -> int:
    """Bytes of finished files, which have a .metadata file, and of files that still grow."""
    root = folder / ".cache" / "huggingface" / "download"
    total = 0
    for place, _, names in os.walk(root):
        for name in names:
            path = Path(place) / name
            if name.endswith(".metadata"):
                total += sizes.get(path.relative_to(root).as_posix().removesuffix(".metadata"), 0)
            elif name.endswith(".incomplete"):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
    return total
