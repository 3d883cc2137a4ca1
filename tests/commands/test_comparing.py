"""Whole comparisons by the command: run, killed and gone on with, with a model that fails; the dry run."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import whole_runs
from helpers.studies.study_runs import StudyRuns, write_tokens
from helpers.whole_runs import processes_in
from moe_exp.cli import main
from moe_exp.runs.records import read_metrics

# A run is little more than its imports.
TINY = whole_runs.TINY | {
    "NUM_LAYERS": 2, "NUM_EXPERTS": 4, "MBSZ": 2, "GBSZ": 4, "TRAIN_ITERS": 6, "DECAY_ITERS": 6,
    "WARMUP_ITERS": 2, "EVAL_INTERVAL": 6, "EVAL_ITERS": 1, "SAVE_INTERVAL": 1, "KEEP_LAST": 1,
    "RUN_NAME": "mine",
}  # fmt: skip
# Of data and anonymous memory of a process: ranks with their threads need half of it.
MEMORY_LIMIT = 2000 * 2**20


class Comparisons(StudyRuns):
    """Comparisons of a test: `runs/mine` in its folder."""

    def __init__(self, path: Path):
        self.folder, tokens = path / "runs" / "mine", write_tokens(path)
        places = {"TRAIN_DATA": tokens, "VALID_DATA": tokens, "RUN_DIR": path / "runs"}
        super().__init__(path, [sys.executable, "-m", "moe_exp", "compare"], TINY | places)

    def iterations(self, name: str) -> list[int]:
        path = self.folder / name / "metrics.jsonl"
        records = read_metrics(path) if path.exists() else []
        return [one["iteration"] for one in records if one["kind"] == "train"]

    def resumed(self, name: str) -> int:
        records = read_metrics(self.folder / name / "metrics.jsonl")
        return sum(one["kind"] == "event" and one["event"] == "resume" for one in records)

    def wait_for(self, name: str, iteration: int, comparison: subprocess.Popen[bytes]) -> None:
        self.wait_until(lambda: iteration in self.iterations(name), comparison)


@pytest.fixture
def comparisons(tmp_path: Path) -> Iterator[Comparisons]:
    mine = Comparisons(tmp_path)
    yield mine
    mine.end()


@pytest.fixture
def alone(no_settings, tmp_path, monkeypatch):
    """In an empty folder."""
    monkeypatch.chdir(tmp_path)


def test_two_models_are_trained_and_not_again(comparisons):
    short = {"TRAIN_ITERS": 4, "DECAY_ITERS": 4, "EVAL_INTERVAL": 4}
    printed = comparisons.answer("compare", **short)
    assert "[1/2] dmoe: finished, loss " in printed and "[2/2] dense: finished, loss " in printed
    assert "FFN_HIDDEN_SIZE: dmoe 96, dense 192" in printed
    assert comparisons.iterations("dmoe") == comparisons.iterations("dense") == [1, 2, 3, 4]
    report = (comparisons.folder / "report.md").read_text()
    assert re.search(r"\| loss at 1.024K tokens +\| +\d\.\d{4} \| +\d\.\d{4} \|", report)
    assert re.search(r"\| last validation loss +\| +\d\.\d{4} \| +\d\.\d{4} \|", report)
    before = {path: path.stat().st_mtime_ns for path in comparisons.folder.glob("*/metrics.jsonl")}
    again = comparisons.answer("compare", **short)
    assert report in again
    assert {path: path.stat().st_mtime_ns for path in comparisons.folder.glob("*/metrics.jsonl")} == before
    refused = comparisons.answer("compare", code=1, HIDDEN_SIZE=128, **short)
    assert "HIDDEN_SIZE=128: " in refused and "dmoe in " in refused
    assert "was started with 64. Fix: restore the old value" in refused


@pytest.mark.slow
def test_a_killed_and_an_interrupted_comparison_go_on(comparisons):
    many = {"TRAIN_ITERS": 120, "DECAY_ITERS": 120, "SAVE_INTERVAL": 20, "EVAL_INTERVAL": 120}
    comparison = comparisons.start(**many)
    comparisons.wait_for("dmoe", 30, comparison)
    os.kill(comparison.pid, signal.SIGKILL)
    comparison.wait()
    # The second call waits for what the killed one has left behind: its run saves a checkpoint and ends.
    comparison = comparisons.start(**many)
    comparisons.wait_for("dense", 30, comparison)
    finished = comparisons.iterations("dmoe")
    assert finished == list(range(1, 121)) and comparisons.resumed("dmoe") == 1
    comparison.send_signal(signal.SIGINT)
    assert comparison.wait(60) == 130
    assert "stopped. Repeat the command to resume." in comparisons.printed()
    assert processes_in(comparisons.folder) == []
    stopped_at = comparisons.iterations("dense")[-1]
    assert stopped_at < 120
    assert (comparisons.folder / "dense" / "checkpoints" / f"iter_{stopped_at:07d}").is_dir()
    comparisons.run(**many)
    assert comparisons.iterations("dense") == finished
    assert comparisons.resumed("dense") == comparisons.resumed("dmoe") == 1


@pytest.mark.slow
def test_a_model_that_fails_stops_no_other(comparisons):
    flags = "--runs dmoe --variant big:USE_MOE=false,FFN_HIDDEN_SIZE=400000 --variant small:USE_MOE=false"
    printed = comparisons.run(*flags.split(), code=1, limit=MEMORY_LIMIT)
    assert "[2/3] big: oom" in printed and "[3/3] small: finished" in printed
    assert re.search(r"- big oom: .*memory", (comparisons.folder / "report.md").read_text())


@pytest.mark.slow
def test_equal_time_and_a_limit(comparisons):
    settings = {"TRAIN_ITERS": 40, "DECAY_ITERS": 40, "SAVE_INTERVAL": 0, "EVAL_INTERVAL": 0}
    printed = comparisons.run("--match", "time", **settings)
    assert re.search(r"times differ by \d+\.\d%", printed) and not (comparisons.folder / "pace").exists()
    kept = json.loads((comparisons.folder / "compare.json").read_text())["variants"]
    for entry in kept.values():
        assert entry["seconds_per_iteration"] > 0 and entry["settings"]["train_iters"] == 40
    assert len(comparisons.iterations("dmoe")) == 40 and len(comparisons.iterations("dense")) > 1
    again = comparisons.run("--match", "time", **settings)
    assert "measuring" not in again and again.partition("\n")[0] in printed
    limited = comparisons.run("--timeout", "1", code=1, RUN_NAME="short", **settings)
    # with a loss, where the first iteration was done by then
    end = r"\[(\d)/2\] (\w+): timeout(?:, loss [\d.]+)?: exceeded --timeout 1 s"
    ends = re.findall(end, limited)
    assert ends == [("1", "dmoe"), ("2", "dense")]


def test_dry_run_starts_and_writes_nothing(alone, tmp_path, monkeypatch, capsys):
    for name, value in TINY.items():
        monkeypatch.setenv(name, str(value))
    flags = "--variant fine:NUM_EXPERTS=8,TOPK=4 --runs dmoe,dense --repeats 2"
    assert main(["compare", "--dry-run", *flags.split()]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("runs/mine: dmoe, dense, fine, matched by flops, 2 runs per variant, seeds ")
    assert re.search(r"\| MLP width +\| +96, 2 of 4 \| +192 \| +48, 4 of 8 \|", printed)
    assert re.search(r"FLOPs per token against dmoe +\| +- \| +\+0\.00% \| +\+0\.00% \|", printed)
    assert "  NUM_EXPERTS: dmoe 4, dense -, fine 8\n" in printed and "all 6 runs: 0:0" in printed
    assert main(["compare", "--dry-run", "--match", "time"]) == 0
    assert "rough prediction" in capsys.readouterr().out
    assert main(["compare", "--dry-run", "--train-data=gone", "--eval-interval=0"]) == 1
    out, err = capsys.readouterr()
    assert "matched by flops" in out
    assert re.fullmatch("moe-exp compare: TRAIN_DATA=gone: .* Fix: .*\n", err)
    assert list(tmp_path.iterdir()) == []


def test_problems_of_one_model_name_it(alone, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PRESET", "cpu")
    for arguments, first, second in (
        (
            "--runs dmoe,dense --topk 65 --min-lr 1",
            "dmoe: TOPK=65: must be at most NUM",
            "MIN_LR=1.0: must be at most LR",
        ),
        ("--repeats 0 --seconds -1", "REPEATS=0: must be at least 1", "SECONDS=-1.0: must be a number"),
    ):
        assert main(["compare", *arguments.split()]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith(f"moe-exp compare: {first}") and lines[1].startswith(second)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_run_is_no_place(alone, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.yaml").write_text("seed: 1\n")
    assert main(["compare", "--preset", "cpu", "--run-name", "one"]) == 1
    assert "RUN_NAME=one: runs/one belongs to a run, not a comparison" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs" / "one").iterdir()] == ["config.yaml"]
