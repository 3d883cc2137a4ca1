"""The merge: nothing lost or doubled, changed shards noticed, the same bytes after any interruption."""

import gzip
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from data.shuffle.test_shuffle import COUNTED, write_jsonl
from helpers import ROOT
from helpers.ranks import RankError, run_on_ranks
from moe_exp.commands.data import main
from moe_exp.data.documents import Tally, read_documents
from moe_exp.data.kinds import BadDocument
from moe_exp.data.shuffle import merge as merge_module
from moe_exp.data.shuffle.merge import merge
from moe_exp.data.shuffle.shuffle import shuffle_documents
from moe_exp.host.files import file_hash


@pytest.fixture
def shards(tmp_path):
    """A folder as `shuffle` makes it."""
    texts = (f"text {number} " + "x" * (number % 97) for number in range(500))
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    shuffle_documents([path], tmp_path / "x_shuffled", name="x", num_shards=5, memory_bytes=2**24)
    return tmp_path / "x_shuffled"


def by_hand(folder):
    return b"".join(path.read_bytes() for path in sorted(folder.glob("x.chunk.*.jsonl")))


def a_folder(tmp_path, **contents):
    """A folder without a manifest."""
    folder = tmp_path / "by_hand"
    folder.mkdir()
    for name, content in {"val.jsonl": b'{"text": "valid"}\n', **contents}.items():
        (folder / name).write_bytes(content)
    return folder


def test_shards_of_a_shuffle(shards, tmp_path):
    manifest = merge(shards, tmp_path / "merged", valid_file_name="x.val")
    assert (tmp_path / "merged.jsonl").read_bytes() == by_hand(shards)
    made = json.loads((shards / "manifest.json").read_text())
    assert manifest["read"] == made["train"] and manifest["checked_by"] == "manifest"
    tally = Tally()
    list(read_documents(tmp_path / "merged.jsonl", tally))
    assert tally.to_json() == made["train"]
    assert json.loads((tmp_path / "merged.manifest.json").read_text()) == manifest
    assert manifest["outputs"][0]["hash"] == file_hash(tmp_path / "merged.jsonl")
    # there is nothing to do
    assert merge(shards, tmp_path / "merged.jsonl", valid_file_name="x.val.jsonl") == manifest


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 16, 17, 18, 19, 2**20])
def test_missing_last_newlines_and_other_ends(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(merge_module, "_BLOCK_BYTES", block_bytes)
    contents = {
        "a.jsonl": b'{"text": "one"}',
        "b.jsonl": b'\xef\xbb\xbf{"text": "two"}\r\n{"text": "three"}\r\n\r\n',
        "c.jsonl": b"",
        "d.jsonl.gz": gzip.compress(b'{"text": "four"}\n\n{"text": ""}'),
        "e.jsonl.zst": zstandard.compress(b'{"text": "five"}'),
        "ignored.txt": b"no document",
    }
    manifest = merge(a_folder(tmp_path, **contents), tmp_path / "merged", valid_file_name="val")
    expected = "".join(f'{{"text": "{number}"}}\n' for number in ("one", "two", "three", "four", "five"))
    assert (tmp_path / "merged.jsonl").read_text() == expected
    assert list(manifest["num_documents"].values()) == [1, 2, 0, 1, 1]
    assert list(manifest["num_documents"]) == list(contents)[:5]
    assert manifest["read"]["skipped"] == {"blank line": 2, "empty text": 1}
    assert manifest["checked_by"] == "lines"


def test_bad_lines_without_a_manifest(tmp_path):
    first, second = b'{"text": "one"}\n{"text": "tw', b'{"text": null}\n{"text": "three"}'
    folder = a_folder(tmp_path, **{"a.jsonl": first, "b.jsonl": second})
    with pytest.raises(BadDocument, match=r"a.jsonl:2: not valid JSON"):
        merge(folder, tmp_path / "merged", valid_file_name="val")
    assert not (tmp_path / "merged.jsonl").exists()
    manifest = merge(folder, tmp_path / "skipping", valid_file_name="val", skip_bad=True)
    assert manifest["read"]["skipped"] == {"not valid JSON": 1, "field 'text' is null, not a text": 1}
    assert (tmp_path / "skipping.jsonl").read_bytes() == b'{"text": "one"}\n{"text": "three"}\n'


def test_tables_with_another_text_column(tmp_path):
    table = pytest.importorskip("pyarrow").table({"content": ["one", "two"], "id": [1, 2]})
    folder = a_folder(tmp_path, **{"val.jsonl": b'{"content": "valid"}\n'})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "part.parquet")
    merge(folder, tmp_path / "all", valid_file_name="val", text_field="content")
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["content"] for line in lines] == ["one", "two"]


def change(path):
    path.write_bytes(path.read_bytes().replace(b"text 1", b"text 2", 1))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("x.chunk.03.jsonl", change, "does not match manifest.json"),
        ("x.chunk.00.jsonl", lambda path: path.write_bytes(b""), "does not match manifest.json"),
        ("x.chunk.04.jsonl", Path.unlink, "is listed in manifest.json but missing. Fix: shuffle"),
        ("y.jsonl", Path.touch, "is not listed in manifest.json. Fix: shuffle again, or"),
        ("x.val.jsonl", Path.unlink, "valid_file_name=x.val: not found in "),
        (".", shutil.rmtree, "folder not found. Fix: "),
    ],
)
def test_a_folder_that_is_not_what_was_made_is_noticed(shards, tmp_path, name, damage, message):
    damage(shards / name)
    with pytest.raises(ValueError, match=message):
        merge(shards, tmp_path / "merged", valid_file_name="x.val")
    assert not (tmp_path / "merged.jsonl").exists()


def test_the_wrong_validation_file_is_noticed(shards, tmp_path):
    for name, rule in (("x.chunk.01", "the validation file is x.val.jsonl"), ("x", "not found")):
        with pytest.raises(ValueError, match=f"valid_file_name={name}: {rule}.* Fix: set "):
            merge(shards, tmp_path / "merged", valid_file_name=name)


def test_it_does_not_write_where_it_must_not(shards, tmp_path):
    with pytest.raises(ValueError, match=r"must not be in the folder to merge. Fix: set a path outside"):
        merge(shards, shards / "merged", valid_file_name="x.val")
    (tmp_path / "merged.jsonl").write_text("somebody's")
    with pytest.raises(ValueError, match=r"merged.jsonl: already exists without a manifest of moe-exp. Fix"):
        merge(shards, tmp_path / "merged", valid_file_name="x.val")
    assert (tmp_path / "merged.jsonl").read_text() == "somebody's"
    merge(shards, tmp_path / "merged", valid_file_name="x.val", start_over=True)
    assert (tmp_path / "merged.jsonl").read_bytes() == by_hand(shards)


def test_nothing_to_merge(tmp_path):
    folder = a_folder(tmp_path)
    with pytest.raises(ValueError, match=r"has only the validation file. Fix: "):
        merge(folder, tmp_path / "merged", valid_file_name="val")
    (folder / "a.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"the shards have no documents. Fix: "):
        merge(folder, tmp_path / "merged", valid_file_name="val")


def test_what_was_written_is_read_back(shards, tmp_path, monkeypatch):
    def damage(merging):
        change(merging.path)
        return check(merging)

    check = merge_module.Merging._check_written
    monkeypatch.setattr(merge_module.Merging, "_check_written", damage)
    with pytest.raises(ValueError, match=r"read back differ from the bytes written for x.chunk.0\d.jsonl"):
        merge(shards, tmp_path / "merged", valid_file_name="x.val")
    assert not (tmp_path / "merged.jsonl").exists()


PROGRAM = """
from moe_exp.data.shuffle import merge
merge._BLOCK_BYTES = 1000
merge.merge(Path({folder!r}), Path({output!r}), valid_file_name="x.val")
Path({output!r} + ".calls").write_text(str(calls))
"""


@pytest.mark.parametrize("with_manifest", [True, False])
def test_killed_anywhere_and_called_again_it_makes_the_same_bytes(shards, tmp_path, with_manifest):
    if not with_manifest:
        (shards / "manifest.json").unlink()

    def run(output, kill_at):
        code = COUNTED.format(kill_at=kill_at, names=["replace"])
        code += PROGRAM.format(folder=str(shards), output=str(output))
        run_on_ranks(1, exec, code, {}, join=False)

    run(tmp_path / "reference", 0)
    calls = int((tmp_path / "reference.calls").read_text())
    reference = json.loads((tmp_path / "reference.manifest.json").read_text())
    for kill_at in (5, calls // 3, calls * 2 // 3, calls - 1, calls):  # the last two are in the publishing
        output = tmp_path / f"killed_{kill_at}"
        with pytest.raises(RankError, match="died with exit code -9"):
            run(output, kill_at)
        assert not (tmp_path / f"killed_{kill_at}.manifest.json").exists()
        made = merge(shards, output, valid_file_name="x.val")
        assert made["read"] == reference["read"]
        assert output.with_suffix(".jsonl").read_bytes() == by_hand(shards)
        assert not (tmp_path / f"killed_{kill_at}.partial").exists()


def test_the_script_and_the_command(shards, tmp_path, monkeypatch, capsys):
    script = ROOT / "moe_exp/scripts/merge_jsonl_files.py"
    flags = shlex.split("--input_dir x_shuffled --valid_file_name x.val --output_file_name x_shuffled_merged")
    monkeypatch.chdir(tmp_path)
    assert main("merge", [*flags, "--dry-run"]) == 0
    assert "disk_bytes" in capsys.readouterr().out and not (tmp_path / "x_shuffled_merged.jsonl").exists()
    done = subprocess.run([sys.executable, script, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "documents" in done.stdout, done.stderr
    assert (tmp_path / "x_shuffled_merged.jsonl").read_bytes() == by_hand(shards)
    other = shlex.split("--input-dir x_shuffled --valid-file-name x.val.jsonl --output-file-name a/b.jsonl")
    assert main("merge", other) == 0
    assert (tmp_path / "a/b.jsonl").read_bytes() == by_hand(shards)
