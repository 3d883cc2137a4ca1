"""From a name to shuffled shards, by the command, on small data of a hub on 127.0.0.1 and of this machine."""

import contextlib
import gzip
import io
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path

import orjson
import pytest
import zstandard

from helpers import ROOT
from helpers.jsonl import read_jsonl, read_texts, write_jsonl

pytest.importorskip("datatrove")
pytest.importorskip("pyarrow")
pytest.importorskip("huggingface_hub")

from helpers.ranks import run_on_ranks
from helpers.servers.hub import leave_host_settings, write_fineweb_parquet
from moe_exp import cli
from moe_exp.commands.data import main
from moe_exp.commands.guard import UNDER_WAY
from moe_exp.data.convert.benchmarks import benchmarks_of
from moe_exp.data.convert.convert import ConvertSettings, convert
from moe_exp.data.download.sources import python_stdlib_documents
from moe_exp.data.prepare import expected_bytes, write_stdlib

SCRIPT = ROOT / "moe_exp/scripts/download_prepare_hf_data.py"
SMALL = ("--memory", "32MB", "--workers", "1")


@pytest.fixture(autouse=True)
def clean_environment(tmp_path, monkeypatch):
    leave_host_settings(monkeypatch, tmp_path / "hf_home", "SLURM_")


def sorted_texts(folder: Path) -> list[str]:
    return sorted(read_texts(*folder.glob("*.jsonl")))


def local_folder(tmp_path: Path, num_files: int = 2) -> Path:
    """Two files of 50 documents, whose source is called `pages`."""
    for index in range(num_files):
        texts = [f"document {index} {number} " + "x" * number for number in range(50)]
        documents = [{"text": text, "id": str(n), "score": n / 10} for n, text in enumerate(texts)]
        write_jsonl(tmp_path / "pages" / f"{index}.jsonl", documents)
    return tmp_path / "pages"


def test_changed_settings_are_refused_unless_told_to_start_over(tmp_path, capsys):
    command = [str(local_folder(tmp_path)), "--data-dir", str(tmp_path / "data"), "--nchunks", "2", *SMALL]
    assert main("prepare", command) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "data").rglob("*.jsonl")}
    for flag, value, what in (("--min_score", "2", "None, not 2.0"), ("--seed", "1", "0, not 1")):
        assert main("prepare", [*command, flag, value]) == 1
        assert f"was made with {flag[2:]}={what}. Fix: use --start-over" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (tmp_path / "data").rglob("*.jsonl")}
    assert main("prepare", [*command, "--min_score", "2", "--start-over"]) == 0
    assert len(read_texts(*(tmp_path / "data/pages_shuffled").glob("*.jsonl"))) == 2 * 30
    assert "filtered: score" in capsys.readouterr().out


def test_flags_reach_the_conversion(tmp_path):
    folder = local_folder(tmp_path)
    again = {"text": "document 0 3 xxx", "id": "again", "score": 0.3}
    write_jsonl(folder / "2.jsonl", [again, {"text": None}])
    flags = shlex.split("--min-chars 15 --max-chars 30 --min-score 0.1 --dedup --skip-bad --tasks 2")
    assert main("prepare", [str(folder), "--data-dir", str(tmp_path / "data"), *SMALL, *flags]) == 0
    manifest = json.loads((tmp_path / "data/pages/manifest.json").read_text())
    assert manifest["read"]["skipped"] == {"field 'text' is null, not a text": 1}
    assert manifest["filtered"]["duplicate"]["num_documents"] == 1
    assert (manifest["settings"]["tasks"], len(manifest["outputs"])) == (2, 2)
    assert all(15 <= len(text) <= 30 for text in read_texts(*(tmp_path / "data/pages").glob("*.jsonl")))


def test_bad_line_is_one_line_of_error(tmp_path, capsys):
    folder = local_folder(tmp_path)
    path = write_jsonl(folder / "2.jsonl", [{"text": "a"}, {"no": "text"}])
    command = [str(folder), "--data-dir", str(tmp_path / "data"), *SMALL]
    assert main("prepare", command) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"moe-exp data: {path}:2: no field 'text'. Fix: ") and error.count("\n") == 1
    made = []
    for _ in range(2):
        assert main("prepare", [*command, "--skip-bad"]) == 0
        made.append({one: one.stat().st_mtime_ns for one in (tmp_path / "data").rglob("manifest.json")})
    assert made[0] == made[1]
    assert main("prepare", command) == 1  # what was skipped is an error without the flag
    assert "was made with skip_bad=True, not False" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("flags", [(), ("--dry-run",), ("--skip-bad",)])
def test_a_damaged_compressed_file_is_named_before_anything_is_made(tmp_path, capsys, suffix, flags):
    content = b"".join(orjson.dumps({"text": f"document {number}"}) + b"\n" for number in range(2000))
    packed = bytearray({"gz": gzip.compress, "zst": zstandard.compress}[suffix](content))
    packed[40:60] = bytes(20)
    path = tmp_path / f"pages/a.jsonl.{suffix}"
    path.parent.mkdir()
    path.write_bytes(packed)
    assert main("prepare", [str(path.parent), "--data-dir", str(tmp_path / "data"), *SMALL, *flags]) == 1
    error = capsys.readouterr().err
    assert re.match(rf"moe-exp data: {path}:\d+: the compressed file is damaged or ends early \(", error)
    assert error.count("\n") == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("flags", [(), ("--start-over",), ("--dry-run",)])
@pytest.mark.parametrize(
    ("source", "data_dir"),
    [
        ("dd/a", "dd"),  # its chunks would be in the source itself
        ("dd/x_raw", "dd"),
        ("dd/a/part.jsonl.d/a", "dd"),
        ("dd/a.partial/a", "dd"),
        ("dd/a.old/a", "dd"),  # set aside, and removed at the end
        ("dd/a_shuffled/a", "dd"),
        ("dd", "dd"),  # they would be among its files the next time
        ("dd", "dd/deep"),
        ("link", "dd"),
    ],
)
def test_the_source_is_not_where_the_outputs_come(tmp_path, capsys, monkeypatch, source, data_dir, flags):
    monkeypatch.chdir(tmp_path)
    Path("dd/a").mkdir(parents=True)
    Path("link").symlink_to("dd/link")
    folder = Path(source if source != "link" else "dd/link")
    write_jsonl(folder / "0.jsonl", [{"text": f"document {number}"} for number in range(50)])
    before = {path: path.read_bytes() for path in Path("dd").rglob("*.jsonl")}
    assert main("prepare", [source, "--data-dir", data_dir, *SMALL, *flags]) == 1
    error = capsys.readouterr().err
    assert re.match(r"moe-exp data: output=\S+: .*the input \S+.* Fix: choose another", error)
    assert before == {path: path.read_bytes() for path in Path("dd").rglob("*.jsonl")}


def test_convert_refuses_an_input_or_benchmarks_in_its_output(tmp_path):
    made, other = (write_jsonl(tmp_path / name / "a.jsonl", [{"text": "a"}]) for name in ("out", "in"))
    for path, decontaminate in ((made, ()), (other, benchmarks_of(made))):
        with pytest.raises(ValueError, match=r"output=.*out: contains the input .*out/a.jsonl"):
            convert([path], tmp_path / "out", ConvertSettings(decontaminate=decontaminate), start_over=True)
    assert made.is_file()


def test_flags_are_not_abbreviated(tmp_path, capsys):
    folder, data = local_folder(tmp_path), tmp_path / "data"
    for abbreviated in ("--start-ov", "--download-ag", "--dry"):
        with pytest.raises(SystemExit):
            main("prepare", [str(folder), "--data-dir", str(data), *SMALL, abbreviated])
        assert f"unrecognized arguments: {abbreviated}" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            cli.main(["data", "prepare", str(folder), "--data-dir", str(data), *SMALL, abbreviated])
        assert f"{abbreviated} does not exist" in capsys.readouterr().err
    assert not data.exists()


def test_python_stdlib(tmp_path):
    path = write_stdlib(tmp_path / "raw")
    written = read_jsonl(path)
    assert [(one["id"], one["text"]) for one in written] == list(python_stdlib_documents())
    before = path.stat()
    assert write_stdlib(tmp_path / "raw").stat() == before
    command = ["python_stdlib", "--data-dir", str(tmp_path / "data"), "--limit", "30", *SMALL]
    assert main("prepare", command) == 0
    chunk = tmp_path / "data/python_stdlib/python_stdlib.chunk.00000.jsonl"
    assert read_jsonl(chunk) == [one for one in written if one["text"]][:30]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nchunks", "0"], "num_shards=0: must be at least 1. Fix: "),
        (["--memory", "15MB"], "must be at least 16 MB. Fix: "),
        (["--tasks", "3"], "tasks=3: must be at most the number of input files (2)"),
        (["--executor", "slurm"], "partition=: required by executor=slurm"),
        (["--decontaminate", "missing.jsonl"], "decontaminate=missing.jsonl: file not found"),
        (["--pattern", "*.parquet"], "pattern=*.parquet: matches no file"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_made(tmp_path, capsys, flags, message):
    command = [str(local_folder(tmp_path)), "--data-dir", str(tmp_path / "data"), *SMALL, *flags]
    assert main("prepare", command) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("data/*/*"))


def test_disk_too_small_is_known_before(tmp_path, capsys, monkeypatch):
    from moe_exp.data import prepare

    monkeypatch.setattr(prepare, "expected_bytes", lambda _: 10**18)
    assert main("prepare", [str(local_folder(tmp_path)), "--data-dir", str(tmp_path / "data"), *SMALL]) == 1
    assert "converting and shuffling requires 3.1 EB. Fix: free up space" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def with_small_files(command: list[str]) -> tuple[int, str]:
    """Of 1 MB at most: as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return main("prepare", command), said.getvalue()


def test_full_disk_is_an_error_and_the_next_call_goes_on(tmp_path):
    folder, data = local_folder(tmp_path), tmp_path / "data"
    write_jsonl(folder / "big.jsonl", [{"text": "x" * 100_000}] * 20)
    command = [str(folder), "--data-dir", str(data), *SMALL]
    ((code, said),) = run_on_ranks(1, with_small_files, command, join=False)
    assert code == 1 and "File too large" in said and not (data / "pages").exists()
    assert main("prepare", command) == 0
    assert sorted_texts(data / "pages_shuffled") == sorted_texts(folder)


def test_script_of_a_checkout_lists_the_sources(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), "--list"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "HuggingFaceFW/fineweb-edu" in done.stdout


def test_slurm_from_the_command_to_the_shards(tmp_path, monkeypatch, cluster):
    folder = local_folder(tmp_path, num_files=1)
    command = [str(folder), "--data-dir", str(tmp_path / "data"), "--memory", "32MB"]
    command += ["--executor", "slurm", "--partition", "cpu"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *command, "--start-over"])
    assert main("prepare") == UNDER_WAY
    assert main("prepare", command) == UNDER_WAY
    assert len(cluster.jobs()) == 3
    cluster.run()
    told = [path.read_text() for path in cluster.folder.glob("*.out")]
    assert (tmp_path / "data/pages_shuffled/manifest.json").is_file(), told
    assert sorted_texts(tmp_path / "data/pages_shuffled") == sorted_texts(folder)
    assert main("prepare", command) == 0
    assert len(cluster.jobs()) == 3


@pytest.mark.slow  # above they start
@pytest.mark.parametrize("flags", [[], ["--min-chars", "30"]])
def test_slurm_starts_over_what_is_there(tmp_path, monkeypatch, cluster, flags):
    folder = local_folder(tmp_path, num_files=1)
    command = [str(folder), "--data-dir", str(tmp_path / "data"), *SMALL]
    assert main("prepare", command) == 0
    before = (tmp_path / "data/pages_shuffled/manifest.json").read_text()
    command += ["--executor", "slurm", "--partition", "cpu", *flags]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *command, "--start-over"])
    assert main("prepare") == UNDER_WAY
    assert (tmp_path / "data/pages_shuffled/manifest.json").read_text() == before
    cluster.run()
    told = [path.read_text() for path in cluster.folder.glob("*.out")]
    assert json.loads((tmp_path / "data/pages/manifest.json").read_text())["starts_over"], told
    kept = [text for text in sorted_texts(folder) if not flags or len(text) >= 30]
    assert sorted_texts(tmp_path / "data/pages_shuffled") == kept, told
    assert not list((tmp_path / "data").glob("*.partial"))
    assert main("prepare", command) == 0


def test_expected_bytes_is_near(tmp_path):
    documents = [{"text": text, "id": path} for path, text in islice(python_stdlib_documents(), 60)]
    plain = write_jsonl(tmp_path / "a.jsonl", documents)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    size = plain.stat().st_size
    assert expected_bytes([plain]) == size
    assert expected_bytes([packed]) == pytest.approx(size, rel=0.3)
    parquet = write_fineweb_parquet(tmp_path / "a.parquet", [one["text"] for one in documents])
    assert expected_bytes([parquet]) == pytest.approx(size, rel=0.1)
    assert expected_bytes([parquet] * 100) == 100 * expected_bytes([parquet])
    parquet.write_bytes(b"")
    assert expected_bytes([parquet]) == 0
