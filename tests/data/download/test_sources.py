"""Sources by name or path; and the standard library: which files are read, in which order."""

import logging
import re
from pathlib import Path

import pytest

from moe_exp.commands.data import main
from moe_exp.data.download.hub import download
from moe_exp.data.download.sources import (
    chosen_files,
    local_files,
    python_stdlib_documents,
    registered_sources,
    resolve_source,
    torch_documents,
)


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
    left_out = ["test/t.py", "a/tests/t.py", "lib2to3/tests/data/t.py", "site-packages/p.py", "a/readme.txt"]
    for path in ["b.py", "a/z.py", "a.py", *left_out]:
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


def test_folder_without_sources_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"^TRAIN_DATA=: .* has none\. Fix: set TRAIN_DATA\.$"):
        list(python_stdlib_documents(tmp_path))


def test_sample_of_torch_is_of_all_its_folders_and_bounded(tmp_path):
    paths = [f"part_{part}/module_{i}.py" for part in range(4) for i in range(50)]
    for path in paths:
        _write(tmp_path, path, b"x = 1\n")
    _write(tmp_path, "test/t.py", b"x = 1\n")
    some = [path for path, _ in torch_documents(6 * 80, tmp_path)]
    assert len(some) == 80
    assert {path.split("/")[1] for path in some} == {"part_0", "part_1", "part_2", "part_3"}
    every = [path for path, _ in torch_documents(10**6, tmp_path)]
    assert every[:80] == some
    assert sorted(every) == sorted(f"torch/{path}" for path in paths)
    assert list(torch_documents(0, tmp_path)) == []


def test_sample_of_the_installed_torch():
    documents, more = dict(torch_documents(10**6)), dict(torch_documents(2 * 10**6))
    sizes = [len(text.encode()) for text in more.values()]
    assert list(documents) == list(more)[: len(documents)]
    assert sum(sizes[: len(documents)]) <= 10**6 < sum(sizes[: len(documents) + 1])
    assert all(path.startswith("torch/") and path.endswith(".py") for path in documents)


def test_registry_is_complete():
    for name, source in registered_sources().items():
        assert (source.name, source.text_field) == (name, "text")
        assert source.licence not in ("", "unknown")
        if name != "python_stdlib":
            assert source.patterns and source.num_bytes and source.num_tokens
            assert re.fullmatch("[0-9a-f]{40}", source.revision)


# As the repositories name them at the commits of the registry.
SAMPLE, DATA = "sample/10BT/000_00000.parquet", "data/CC-MAIN-2013-20/000_00000.parquet"
DCLM = [
    f"global-shard_{part}_of_10/local-shard_{shard}_of_10/shard_000000{shard}0_processed.jsonl.zst"
    for part, shard in (("01", 0), ("10", 5))
]
SLIMPAJAMA = [
    f"{part}/chunk1/example_{kind}_0.jsonl.zst"
    for part, kind in (("train", "train"), ("validation", "holdout"), ("test", "holdout"))
]


@pytest.mark.parametrize(
    ("name", "names", "chosen"),
    [
        ("fineweb_edu_10bt", [DATA, SAMPLE], [SAMPLE]),
        ("fineweb_edu", [DATA, SAMPLE], [DATA]),
        ("fineweb_10bt", [DATA, SAMPLE], [SAMPLE]),
        ("fineweb", [DATA, SAMPLE], [DATA]),
        ("dclm_baseline_1.0", DCLM, DCLM),
        ("dclm_baseline_1.0_10prct", DCLM, DCLM[:1]),
        ("slimpajama", SLIMPAJAMA, SLIMPAJAMA[:1]),
    ],
)
def test_patterns_choose_what_they_should(name, names, chosen):
    assert chosen_files(["README.md", *names], registered_sources()[name].patterns, name) == chosen


@pytest.mark.parametrize(
    ("sizes", "chosen", "warning"),
    [
        ({"a.jsonl": 9, "B.JSONL.gz": 9, "README.md": 99, "infos.json": 9}, ["B.JSONL.gz", "a.jsonl"],
         "here: left out 1 file, 9 bytes: 1 .json next to records"),
        ({"en/a.json.gz": 9, "en/b.Json": 9, "dataset_infos.json": 99}, ["en/a.json.gz", "en/b.Json"], ""),
        ({"a.Parquet": 50, "b.json": 9, "c.TXT": 9, "d.zip": 9}, ["a.Parquet"],
         "here: left out 3 files, 27 bytes: 1 .json next to records, 1 .txt next to records, 1 .zip"),
        ({"a.TXT": 9, "b.text.zst": 9}, ["a.TXT", "b.text.zst"], ""),
    ],
)  # fmt: skip
def test_a_listing_without_a_pattern(sizes, chosen, warning, caplog):
    """Of the hub or a store, where files are not looked into."""
    assert chosen_files(sizes, [], "here") == chosen
    assert [message.partition(" (")[0] for message in caplog.messages] == ([warning] if warning else [])


def test_a_listing_of_which_most_would_be_left_out_is_refused():
    rule = r"1 \.zip .*, which is most of the data\. Fix: .* such as --pattern '\*\.parquet'"
    with pytest.raises(ValueError, match=rule):
        chosen_files({"a.parquet": 9, "b.zip": 10}, [], "here")
    with pytest.raises(ValueError, match=r"^pattern=\*: matches b.zip, which is not one of \..*Fix: "):
        chosen_files(["a.parquet", "b.zip"], ["*"], "here")
    assert chosen_files({"a.parquet": 9, "b.zip": 10}, ["*.parquet"], "here") == ["a.parquet"]


def test_list_command_prints_every_source(capsys):
    assert main("list", []) == 0
    shown = capsys.readouterr().out
    for source in registered_sources().values():
        assert source.name in shown and source.licence.split(",")[0] in shown
    assert "28.5 GB" in shown and "about 31 GB" in shown and "about 1.5T" in shown and "about 3M" in shown


def test_registered_name_and_changes_to_it():
    assert resolve_source("fineweb_edu_10bt") == registered_sources()["fineweb_edu_10bt"]
    changed = resolve_source("fineweb_edu", patterns=["data/x/*"], text_field="body", revision="main")
    assert (changed.patterns, changed.text_field, changed.revision) == (("data/x/*",), "body", "main")
    assert changed.num_bytes is None  # it was of other files
    assert changed.licence == "ODC-By 1.0"


def test_dataset_of_the_hub():
    source = resolve_source("allenai/c4", patterns=["en/*.json.gz"], text_field="text")
    assert (source.name, source.repository, source.revision) == ("c4", "allenai/c4", "main")
    assert source.patterns == ("en/*.json.gz",)


@pytest.mark.parametrize("name", ["fineweb_edu_10b", "FineWeb_Edu_10BT", "fineweb-edu-10bt"])
def test_unknown_name_gets_the_nearest(name):
    with pytest.raises(ValueError, match=rf"^source={name}: unknown source.*did you mean fineweb_edu_10bt\?"):
        resolve_source(name)


def test_local_folder_and_file(tmp_path):
    data = ["b.jsonl", "a/z.jsonl.zst", "a/y.jsonl.gz", "a.parquet"]
    for name in [*data, "notes.txt", ".cache/x.jsonl", ".hidden.jsonl", "manifest.json"]:
        _write(tmp_path / "corpus", name, b"")
    source = resolve_source(str(tmp_path / "corpus"))
    assert (source.name, source.repository, source.path) == ("corpus", None, tmp_path / "corpus")
    names = [path.relative_to(source.path).as_posix() for path in local_files(source)]
    assert names == sorted(data)
    assert download(source, tmp_path / "unused") == local_files(source)
    assert not (tmp_path / "unused").exists()
    chosen = resolve_source(str(source.path), patterns=["a/*.gz"])
    assert local_files(chosen) == [source.path / "a/y.jsonl.gz"]
    file = resolve_source(str(source.path / "a/z.jsonl.zst"))
    assert (file.name, local_files(file)) == ("z", [source.path / "a/z.jsonl.zst"])


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path, caplog):
    for name in ("corpus/a/b.jsonl", "elsewhere/c.jsonl", "elsewhere/deep/d.jsonl", "around.jsonl"):
        _write(tmp_path, name, b"")
    root, out = tmp_path / "corpus", tmp_path / "elsewhere"
    targets = {"0_twice": root / "a", "a/self": root, "a/up": tmp_path, "link": out, "m": out / "deep"}
    for name, target in targets.items():
        (root / name).symlink_to(target)
    (out / "back").symlink_to(root / "a")
    with caplog.at_level("INFO"):
        files = local_files(resolve_source(str(root)))
    names = [path.relative_to(root).as_posix() for path in files]
    assert names == ["a/b.jsonl", "link/c.jsonl", "link/deep/d.jsonl"]
    for left_out in ("0_twice", "a/self", "m", "link/back"):
        assert f"{root / left_out}: left out because its target is already included" in caplog.messages
    assert f"{root / 'a/up'}: left out because it links to a parent folder" in caplog.messages


def test_local_path_without_data(tmp_path):
    _write(tmp_path, "notes.doc", b"")
    for path, patterns, rule in (
        (tmp_path, [], r": has no file of type \.jsonl, .*, only notes\.doc\. Fix: "),
        (tmp_path / "notes.doc", [], r"notes\.doc: must be one of \.jsonl, .*Fix: "),
        (tmp_path, ["x/*"], r"^pattern=x/\*: matches no file in .*, which has notes\.doc\. Fix: "),
    ):
        with pytest.raises(ValueError, match=rule):
            local_files(resolve_source(str(path), patterns=patterns))


def test_standard_library_needs_no_files(tmp_path, capsys):
    assert download(resolve_source("python_stdlib"), tmp_path / "unused") == []
    assert main("download", ["python_stdlib"]) == 0
    assert "nothing to download" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("", {}, r"^source=: must not be empty"),
        (" ", {}, r"^source=: must not be empty"),
        ("/no/such.jsonl", {}, "^source=/no/such.jsonl: file or folder not found"),
        ("./nothere", {}, "^source=./nothere: file or folder not found"),
        ("missing.parquet", {}, "^source=missing.parquet: file or folder not found"),
        ("python_stdlib", {"patterns": ["*.py"]}, r"^pattern=\*.py: does not apply to python_stdlib. Fix: "),
        ("/", {"revision": "v1"}, r"^revision=v1: only applies to datasets on the Hub.*Fix: omit"),
    ],
)
def test_what_is_no_source(name, options, rule):
    with pytest.raises(ValueError, match=rule):
        resolve_source(name, **options)
