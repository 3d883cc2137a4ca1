"""The ladder command: definitions in files, what it refuses, and whole ladders, here and by SLURM."""

import json
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from helpers.slurm.cluster import Cluster
from helpers.studies.study_runs import StudyRuns, write_tokens
from moe_exp.cli import main
from moe_exp.studies import child_runs

TINY = {
    "PRESET": "cpu", "GPUS_PER_NODE": 1, "NUM_LAYERS": 1, "HIDDEN_SIZE": 16, "NUM_HEADS": 2,
    "NUM_QUERY_GROUPS": 2, "FFN_HIDDEN_SIZE": 32, "SEQ_LEN": 32, "NUM_EXPERTS": 4, "MBSZ": 2, "GBSZ": 4,
    "WARMUP_ITERS": 1, "LOG_INTERVAL": 1, "EVAL_ITERS": 1, "EVAL_INTERVAL": 100, "SAVE_INTERVAL": 100,
    "DISK_CHECK": "none", "RUN_NAME": "mine",
}  # fmt: skip
RUNGS = "repeats: 1\nasymptote: 0.0\nrungs: [{TRAIN_ITERS: 2}, {TRAIN_ITERS: 4}, {TRAIN_ITERS: 8}]\n"


def places(path):
    """Settings of a tiny ladder in `path`."""
    (path / "mine.yaml").write_text(RUNGS)
    tokens = write_tokens(path, 50)
    return {"TRAIN_DATA": tokens, "VALID_DATA": tokens, "RUN_DIR": path / "runs"}


def test_definitions_in_files(no_settings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "about: A claim.\nsettings: {PRESET: cpu, LR: 0.004}\nruns: dmoe,dense\nrepeats: 2\n"
        "rungs: [{TRAIN_ITERS: 30}, {TRAIN_ITERS: 60}]\n"
    )
    assert main(["ladder", "mine.yaml", "--disk-check=none", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("runs/ladder_mine_cpu: dmoe, dense, 2 rungs, 2 seeds, baseline dense\n")
    assert "0.004" in printed
    for flags, line in (
        ("mine.yaml --train-iters=9", "TRAIN_ITERS=9: cannot be set"),
        ("none.yaml", "DEFINITION=none.yaml: not found. Fix: use a YAML file"),
        ("mine.yaml --executor=cloud", "EXECUTOR=cloud: unknown executor. Fix: use local or slurm."),
        ("--sizes=few", "SIZES=few: must be a comma-separated list of positive numbers"),
    ):
        assert main(["ladder", *flags.split(), "--dry-run"]) == 1
        assert line in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["ladder", "--asymptote=low"])
    assert "--asymptote: invalid float value: 'low'" in capsys.readouterr().err
    for text, line in (
        ("rung: []\n", "unknown fields rung. Fix: use name, about, settings"),
        ("", "DEFINITION=odd.yaml: must be a mapping of fields. Fix: use name, about"),
        ("rungs: [16, 32]\n", "RUNGS=[16, 32]: must be a valid dictionary in odd.yaml. Fix: "),
        ("repeats: three\n", "REPEATS=three: must be a valid integer"),
        ("runs: [dmoe]\n", "RUNS=['dmoe']: must be a valid string in odd.yaml."),
        ("a: [\n", "odd.yaml: is damaged ("),
        (RUNGS + "settings: {NUM_EXPERT: 4}\n", "NUM_EXPERT=4: unknown setting. Fix: correct it in the"),
    ):
        (tmp_path / "odd.yaml").write_text(text)
        assert main(["ladder", "odd.yaml"]) == 1
        assert line in capsys.readouterr().err
    monkeypatch.setenv("LR", "")
    assert main(["ladder", "mine.yaml", "--disk-check=none", "--dry-run"]) == 0
    assert "0.004" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "odd.yaml"]


@pytest.mark.slow
def test_a_ladder_that_is_ended_continues_and_does_not_predict_twice(tmp_path):
    words = [sys.executable, "-m", "moe_exp", "ladder", str(tmp_path / "mine.yaml")]
    ladder, folder = StudyRuns(tmp_path, words, TINY | places(tmp_path)), tmp_path / "runs" / "mine"
    first = ladder.start()
    ladder.wait_until((folder / "rung_1" / "dmoe" / "summary.json").exists, first)
    first.send_signal(signal.SIGTERM)
    first.wait()
    assert "Repeat the command to resume." in ladder.printed()
    printed = ladder.run()
    assert "rung_1/dmoe:" not in printed and "5/5 rung_3/dense: finished" in printed
    prediction = (folder / "prediction_3.json").read_text()
    summary = (folder / "rung_3" / "dmoe" / "summary.json").stat().st_mtime
    assert (folder / "prediction_3.json").stat().st_mtime < summary
    results = json.loads((folder / "ladder.json").read_text())
    assert set(results["prediction"]["errors"]) == {"dmoe", "dense"} and results["left_out"] == []
    assert "finished, loss" not in ladder.run()
    assert (folder / "prediction_3.json").read_text() == prediction
    assert "LR=0.01:" in (changed := ladder.run("--lr=0.01", code=1))
    assert "restore the old value, or use another RUN_NAME" in changed


@pytest.mark.slow
def test_slurm_jobs_run_each_rung(no_settings, tmp_path, monkeypatch, capsys):
    cluster = Cluster(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{cluster.programs}:{os.environ['PATH']}")
    # between two questions what is queued runs
    clock = SimpleNamespace(sleep=lambda seconds: cluster.run(), monotonic=time.monotonic)
    monkeypatch.setattr(child_runs, "time", clock)
    for name, value in {**TINY, **places(tmp_path)}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["ladder", str(tmp_path / "mine.yaml"), "--executor=slurm", "--timeout=600"]) == 0
    printed = capsys.readouterr().out
    assert "6/6 rung_3/" in printed and "effective speedup of dmoe" in printed
    assert len(cluster.jobs()) == 6
