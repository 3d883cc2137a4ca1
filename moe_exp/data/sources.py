"""Where documents come from. The default corpus needs no network: the Python standard library is on every host that runs this."""

from __future__ import annotations

import logging
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

PYTHON_STDLIB_LICENSE = "PSF-2.0"

# Tests are left out because CPython's own are many but a distribution's package often lacks them; installed packages
# because they have other licences and differ from host to host.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def python_stdlib_documents(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yields (relative path, text) of the .py files of the standard library of this interpreter, sorted by relative path.

    Folders of tests and of installed packages are left out. The text is licensed under PSF-2.0, the Python Software
    Foundation licence (https://docs.python.org/3/license.html). Files that cannot be decoded with the encoding that they
    declare (UTF-8 where they declare none) are skipped, and a warning names them.

    Args:
        root: folder to read; the standard library by default.

    Raises:
        ValueError: no .py file under `root`, as in an interpreter whose standard library is a zip file.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = _python_files(root)
    if not paths:
        raise ValueError(f"TRAIN_DATA=: the embedded corpus needs the .py files of {root}, which has none. Fix: set TRAIN_DATA.")
    skipped = []
    for path in paths:
        text = _read(root / path)
        if text is None:
            skipped.append(path)
        else:
            yield path, text
    if skipped:
        logger.warning("skipped %d of %d files of %s, not decodable: %s", len(skipped), len(paths), root, ", ".join(skipped))


def _python_files(root: Path) -> list[str]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    return sorted(found)


def _read(path: Path) -> str | None:
    """Text of a source file, or None where its bytes are not in the encoding of its cookie."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (UnicodeDecodeError, SyntaxError):  # SyntaxError: tokenize does not know the declared encoding
        return None
