"""The embedded corpus: which files of the standard library are read, in which order, and what becomes of undecodable ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from moe_exp.data.sources import python_stdlib_documents


def _write(root: Path, path: str, content: bytes) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)


def test_stdlib_has_its_modules_and_no_tests():
    paths = [path for path, _ in python_stdlib_documents()]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(paths)
    assert paths == sorted(paths)
    assert len(set(paths)) == len(paths)
    folders = {part for path in paths for part in Path(path).parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def test_sorted_by_path_and_tests_left_out(tmp_path):
    for path in ("b.py", "a/z.py", "a.py", "test/t.py", "a/tests/t.py", "lib2to3/tests/data/t.py", "site-packages/p.py", "a/readme.txt"):
        _write(tmp_path, path, path.encode())
    # A module called test.py is no folder of tests.
    _write(tmp_path, "unittest/test.py", b"x = 1\n")
    documents = list(python_stdlib_documents(tmp_path))
    assert [path for path, _ in documents] == ["a.py", "a/z.py", "b.py", "unittest/test.py"]
    assert dict(documents)["a/z.py"] == "a/z.py"


def test_declared_encoding_is_used_and_undecodable_files_are_named(tmp_path, caplog):
    _write(tmp_path, "latin.py", "# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    _write(tmp_path, "good.py", "name = 'é'\n".encode())
    _write(tmp_path, "bad.py", b"name = '\xe9'\n")
    _write(tmp_path, "unknown.py", b"# -*- coding: no-such-code -*-\n")
    with caplog.at_level(logging.WARNING):
        documents = dict(python_stdlib_documents(tmp_path))
    assert sorted(documents) == ["good.py", "latin.py"]
    assert documents["latin.py"].endswith("name = 'é'\n")
    assert len(caplog.messages) == 1
    assert "skipped 2 of 4 files" in caplog.text
    assert "bad.py, unknown.py" in caplog.text


def test_nothing_is_logged_when_nothing_is_skipped(tmp_path, caplog):
    _write(tmp_path, "good.py", b"x = 1\n")
    with caplog.at_level(logging.INFO):
        assert len(list(python_stdlib_documents(tmp_path))) == 1
    assert not caplog.messages


def test_folder_without_sources_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"^TRAIN_DATA=: .*which has none\. Fix: set TRAIN_DATA\.$"):
        list(python_stdlib_documents(tmp_path))
