"""The shuffle by tasks: the same bytes for any number of tasks and any memory, after any interruption."""

import gzip
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import zstandard

from data.shuffle.test_shuffle import expected_files, some_texts, write_jsonl
from helpers import ROOT
from moe_exp.commands.data import main
from moe_exp.commands.guard import UNDER_WAY
from moe_exp.data.execution import Execution
from moe_exp.data.kinds import BadDocument
from moe_exp.data.shuffle import scatter, write
from moe_exp.data.shuffle.blocks import cut_inputs
from moe_exp.data.shuffle.shuffle import Memory, shuffle_documents
from moe_exp.data.shuffle.write import LineBuffer

pytest.importorskip("datatrove")

HERE = Execution(workers=1)
SETTINGS = {"name": "x", "seed": 3, "num_shards": 5, "valid_fraction": 0.05, "memory_bytes": 2**24}


def some_inputs(folder):
    """Files of every kind, with all that a file of JSONL may have between its documents."""
    folder.mkdir()
    paths = [write_jsonl(folder / f"{number}.jsonl", some_texts(90, number)) for number in range(4)]
    lines = paths[1].read_bytes().splitlines()
    paths[1].write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\r\n\r\n" + b'{"text": ""}\n\n')
    paths[2].write_bytes(paths[2].read_bytes().rstrip(b"\n"))
    lines = [line.replace(b'"text": "', b'"text": "zipped ') for line in lines]
    (folder / "4.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    (folder / "5.jsonl.zst").write_bytes(zstandard.compress(b"\n".join(lines[::-1])))
    (folder / "6.jsonl").touch()
    (folder / "7.txt").write_text("a text of its own\n")
    return sorted(folder.iterdir())


def facts_of(manifest):
    return {name: value for name, value in manifest.items() if name not in ("id", "made_at", "seconds")}


@pytest.fixture
def small(monkeypatch):
    """Blocks, buckets and pieces that are small enough for there to be many of them."""
    monkeypatch.setattr(scatter, "_BLOCK_BYTES", 3000)
    monkeypatch.setattr(scatter, "_BYTES_PER_SEGMENT", 1)
    monkeypatch.setattr(Memory, "of", lambda _: Memory(2**20, 20_000))


@pytest.mark.parametrize(
    "num_tasks", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 7))]
)
def test_any_number_of_tasks_gives_the_same_bytes(tmp_path, small, num_tasks):
    inputs = some_inputs(tmp_path / "in")
    one = shuffle_documents(inputs, tmp_path / "one", **SETTINGS)
    found = shuffle_documents(inputs, tmp_path / "tasks", **SETTINGS, tasks=num_tasks, execution=HERE)
    assert data_of(tmp_path / "tasks") == data_of(tmp_path / "one") == expected_files(inputs, **SETTINGS)
    assert facts_of(found) == facts_of(one)
    names = {path.name for path in (tmp_path / "tasks").iterdir() if path.suffix != ".jsonl"}
    assert names == ({"manifest.json"} if num_tasks == 1 else {"datatrove", "manifest.json"})


CHANGES = [{"valid_fraction": 1e-12}, {"num_shards": 200}, {"seed": 4, "num_shards": 1}]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_single_validation_text_empty_shards_and_one_shard(tmp_path, small, changes):
    inputs = some_inputs(tmp_path / "in")
    expected = expected_files(inputs, **SETTINGS | changes)
    for tasks in (1, 3):
        shuffle_documents(inputs, tmp_path / f"{tasks}", **SETTINGS | changes, tasks=tasks, execution=HERE)
        assert data_of(tmp_path / f"{tasks}") == expected


def data_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}


def test_a_bucket_larger_than_the_memory_and_documents_larger_than_a_block(tmp_path, small, monkeypatch):
    texts = [f"{number} " + "x" * (30_000 if number % 50 == 0 else number) for number in range(400)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    expected = expected_files([path], **SETTINGS)
    for piece_bytes in (20_000, 50_000, 10**6):
        memory = Memory(2**20, piece_bytes)
        monkeypatch.setattr(Memory, "of", lambda _, memory=memory: memory)
        output = tmp_path / str(piece_bytes)
        shuffle_documents([path], output, **SETTINGS, tasks=3, execution=HERE)
        assert data_of(output) == expected


def test_lines_whose_place_in_the_file_is_one_less_than_in_the_buffer(tmp_path):
    path, buffer = tmp_path / "lines", LineBuffer()
    path.write_bytes(b"aaa\nbb\nc\ndddd\n")
    buffer.allocate(12)
    buffer.view[:1] = b"\n"
    places, begins, ends = np.array([0, 4, 9]), np.array([1, 5, 8]), np.array([5, 8, 12])
    buffer.read(path, places, begins, ends)
    assert bytes(buffer.view[:12]) == b"\naaa\nbb\ndddd"


@pytest.mark.parametrize("num_tasks", [1, 2, 3, 8, 50])
def test_slices_are_all_lines_once_and_in_order(tmp_path, num_tasks):
    random_sizes = np.random.default_rng(num_tasks)
    paths = [tmp_path / f"{number}.jsonl" for number in range(6)]
    for path in paths:
        path.write_bytes(b"".join(b"x" * int(size) + b"\n" for size in random_sizes.integers(0, 40, 30)))
    paths.insert(2, tmp_path / "z.jsonl.gz")
    paths[2].write_bytes(gzip.compress(b"y\n" * 100))
    slices = cut_inputs(paths, num_tasks)
    assert len(slices) == num_tasks
    read = dict.fromkeys(paths, b"")
    flat = [one for some in slices for one in some]
    assert [paths.index(one.path) for one in flat] == sorted(paths.index(one.path) for one in flat)
    for one in flat:
        start, end = one.bounds()
        content = one.path.read_bytes()[start:end]
        assert content.endswith(b"\n") or not content or one.end is None
        read[one.path] += content
    assert read == {path: path.read_bytes() for path in paths}
    sizes = [sum(one.num_bytes for one in some) for some in slices]
    largest = max(path.stat().st_size for path in paths)
    assert max(sizes) <= sum(sizes) / num_tasks + largest


def test_a_bad_line_is_named_by_its_number_in_the_file_or_counted(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", some_texts(300))
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(250, b'{"no": 1}\n')
    path.write_bytes(b"".join(lines))
    with pytest.raises(BadDocument, match=r"a\.jsonl:251: no field 'text'"):
        shuffle_documents([path], tmp_path / "out", **SETTINGS, tasks=4, execution=HERE)
    expected = shuffle_documents([path], tmp_path / "one", **SETTINGS, skip_bad=True)
    options = {"tasks": 4, "execution": HERE, "skip_bad": True, "start_over": True}
    found = shuffle_documents([path], tmp_path / "out", **SETTINGS, **options)
    assert found["read"]["skipped"] == expected["read"]["skipped"] == {"no field 'text'": 1}


def interrupted(inputs, output, **options):
    """A call that fails in its last pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write._Writer, "_write_piece", lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            shuffle_documents(inputs, output, **SETTINGS, **{"tasks": 3, "execution": HERE} | options)


def test_a_call_that_resumes_does_not_read_again(tmp_path, small, monkeypatch):
    # the buffers' size limits the number of buckets
    monkeypatch.setattr(scatter, "_BYTES_PER_SEGMENT", 2**18)
    monkeypatch.setattr(scatter, "_FEW_BUCKETS", 1)
    inputs = some_inputs(tmp_path / "in")
    expected = expected_files(inputs, **SETTINGS)
    interrupted(inputs, tmp_path / "out")
    monkeypatch.setattr(scatter, "read_slice", lambda *_: 1 / 0)
    monkeypatch.setattr(Memory, "of", lambda _: Memory(2**19, 5000))  # another budget
    shuffle_documents(inputs, tmp_path / "out", **SETTINGS, tasks=3, execution=HERE)
    assert data_of(tmp_path / "out") == expected


def test_another_number_of_tasks_is_refused(tmp_path, small):
    inputs = some_inputs(tmp_path / "in")
    interrupted(inputs, tmp_path / "out")
    for tasks in (1, 4):
        with pytest.raises(ValueError, match=rf"tasks={tasks}: .*started with 3 tasks\. Fix: set --tasks 3 "):
            shuffle_documents(inputs, tmp_path / "out", **SETTINGS, tasks=tasks, execution=HERE)
    made = shuffle_documents(inputs, tmp_path / "out", **SETTINGS, start_over=True)
    # what is finished has no number of tasks
    again = shuffle_documents(inputs, tmp_path / "out", **SETTINGS, tasks=4, execution=HERE)
    assert again == made


@pytest.mark.parametrize("suffix", ["lines", "records"])
def test_what_a_power_cut_has_taken_is_noticed(tmp_path, small, suffix):
    inputs = some_inputs(tmp_path / "in")
    interrupted(inputs, tmp_path / "out")
    cut = tmp_path / f"out.partial/temporary/scattered/00001.{suffix}"
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"00001\.{suffix}: has \d+ bytes instead of \d+\. Fix: add"):
        shuffle_documents(inputs, tmp_path / "out", **SETTINGS, tasks=3, execution=HERE)


def test_lines_that_change_on_the_disk_are_noticed(tmp_path, small):
    inputs = some_inputs(tmp_path / "in")
    interrupted(inputs, tmp_path / "out")
    lines = tmp_path / "out.partial/temporary/scattered/00001.lines"
    lines.write_bytes(lines.read_bytes().replace(b"xxx", b"xyx", 1))
    with pytest.raises(ValueError, match="the lines read back differ from the inputs"):
        shuffle_documents(inputs, tmp_path / "out", **SETTINGS, tasks=3, execution=HERE)
    assert not (tmp_path / "out").exists()


def kill_after(num_tasks, seconds, call, output):
    """Makes a call that is killed, with its workers, so many seconds after so many of its tasks are done."""
    code = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))()"
    command = [sys.executable, "-c", code, pickle.dumps(partial(call, output=output)).hex()]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    begun = output.with_name(f"{output.name}.partial")
    while process.poll() is None and len(list(begun.glob("datatrove/*/completions/*"))) < num_tasks:
        time.sleep(0.005)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_called_again_it_makes_the_same_bytes(tmp_path, times):
    folder, choice = tmp_path / "in", random.Random(5)
    folder.mkdir()
    for number in range(6):
        write_jsonl(folder / f"{number}.jsonl", some_texts(3000 * times, number))
    expected = expected_files(sorted(folder.iterdir()), **SETTINGS)
    by_tasks = partial(shuffle_documents, [folder], **SETTINGS, tasks=3, execution=Execution(workers=2))
    for number in range(times):
        output = tmp_path / f"killed_{number}"
        kill_after((9 * number + 4) // times, choice.uniform(0, 0.3), by_tasks, output)  # of nine tasks
        by_tasks(output=output)
        assert data_of(output) == expected
        assert not (tmp_path / f"killed_{number}.partial").exists() and not (output / "temporary").exists()
        shutil.rmtree(output)


@pytest.mark.slow
def test_slurm_jobs_one_pass_after_the_other(tmp_path, monkeypatch, cluster):
    monkeypatch.chdir(tmp_path)
    inputs = [write_jsonl(tmp_path / f"{number}.jsonl", some_texts(90, number)) for number in range(2)]
    arguments = [*map(str, inputs), "--output", "out", "--seed", "3", "--shards", "5", "--name", "x"]
    arguments += ["--valid-fraction", "0.05"]

    arguments += ["--tasks", "2", "--executor", "slurm", "--partition", "cpu"]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "moe_exp/__main__.py"), "data", "shuffle", *arguments])
    assert main("shuffle", arguments) == UNDER_WAY
    # three passes, each with the merging of its stats, and the publishing
    assert len(cluster.jobs()) == 7
    with pytest.raises(ValueError, match=r"SLURM jobs are still using it\. Fix: scancel 100 .*106, or wait"):
        shuffle_documents(inputs, tmp_path / "out", **SETTINGS, tasks=2, execution=HERE)
    assert main("shuffle", arguments) == UNDER_WAY and len(cluster.jobs()) == 7
    cluster.run()
    assert (tmp_path / "out").is_dir(), [path.read_text() for path in cluster.folder.glob("*.out")]
    assert data_of(tmp_path / "out") == expected_files(inputs, **SETTINGS)
