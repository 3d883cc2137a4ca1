"""`moe-exp watch storage`: intervals by hand, bytes of a run, the refusal of a disk that is too small."""

import json
import math
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.checkpoint.ckpt_files import write_without_tensors
from moe_exp.cli import main
from moe_exp.config import Config, load_config, to_yaml
from moe_exp.launch.machine_checks import check_files, disk_warnings
from moe_exp.planner.costs.params import checkpoint_bytes
from moe_exp.planner.costs.saves import (
    daly_interval,
    disk_use,
    keep_last_that_fits,
    lost_share,
    young_interval,
)
from moe_exp.watch.storage import Measured, measured, save_advice, storage_of


def test_intervals_by_hand():
    # A save of 50 s, a failure an hour: sqrt(2 * 50 * 3600) = 600 and d / 2M = 1/144.
    assert young_interval(50, 3600) == pytest.approx(600)
    assert daly_interval(50, 3600) == pytest.approx(600 * (1 + 1 / 36 + 1 / 1296) - 50)
    assert daly_interval(7200, 3600) == 3600  # a save takes two failures: as rarely as that
    # With M = 3600, t + d = 3600 and R = 0: 3600 * (e - 1) / t.
    assert lost_share(3550, 50, 3600) == pytest.approx(3600 * (math.e - 1) / 3550 - 1)
    assert lost_share(3550, 50, 3600, 360) == pytest.approx(3600 * math.exp(0.1) * (math.e - 1) / 3550 - 1)
    assert lost_share(1e9, 50, 3600) == math.inf


@pytest.mark.parametrize(("save", "mtbf"), [(50, 3600), (10, 86400), (600, 1800)])
def test_dalys_interval_is_where_the_model_loses_least(save, mtbf):
    daly, young = daly_interval(save, mtbf), young_interval(save, mtbf)
    best = min(range(10, 4 * int(young), 5), key=lambda t: lost_share(t, save, mtbf))
    assert daly == pytest.approx(best, rel=0.05)
    assert lost_share(daly, save, mtbf) <= lost_share(best, save, mtbf) * 1.001
    assert lost_share(young, save, mtbf) >= lost_share(daly, save, mtbf)


def event(name: str, minute: int, **values: object) -> dict[str, object]:
    when = f"2026-11-22T10:{minute:02d}:00+00:00"
    return {"kind": "event", "event": name, "iteration": minute, "time": when, **values}


TRAIN = {"kind": "train", "elapsed_time_per_iteration_ms": 2000.0}
RECORDS = [
    event("start", 0),
    *(TRAIN | {"iteration": i, "training_seconds": 3600.0 * i} for i in range(1, 11)),
    event("checkpoint", 10, seconds=40.0, bytes=5_000),
    event("rank_failed", 20),
    event("rank_failed", 21),  # the other ranks of the same failure
    event("resume", 24),
    event("checkpoint", 30, seconds=60.0, bytes=7_000),
    event("rank_failed", 40),
    event("resume", 42),
]


def test_what_a_run_has_measured():
    assert measured(RECORDS) == Measured(2.0, 50.0, 7_000, 10.0, 2, 150.0, 10)
    assert measured([]) == Measured()


def test_advice():
    found = measured(RECORDS)
    own = save_advice(1000, found)
    assert own.mtbf_hours == 5.0
    assert own.source == "2 failures in 10.0 hours of this run"
    assert own.best_iterations == round(daly_interval(50, 18_000) / 2)
    given = save_advice(1000, found, mtbf_hours=1000, num_nodes=100)
    assert given.mtbf_hours == 10.0
    assert given.present_share == lost_share(2000, 50, 36_000, 150)
    assert given.best_share < given.present_share
    assert given.source == "--mtbf 1000 hours per node, 100 nodes"
    assert save_advice(0, found).present_share is None
    short = save_advice(1000, replace(found, hours=0.02, num_failures=1))
    assert (
        short.source
        == "1 failure in 1.2 minutes of this run, too little data for an estimate: set --mtbf HOURS"
    )
    assert save_advice(1000, Measured()) is None


def config(**values: object) -> Config:
    usual = {"preset": "cpu", "gpus_per_node": 1, "train_iters": 1000, "save_interval": 100}
    return load_config(usual | values, {})


@pytest.mark.parametrize(
    ("values", "iteration", "there", "at_once", "new"),
    [
        ({}, 0, [], 10, 10),
        ({"save_interval": 300}, 0, [], 4, 4),  # 300, 600, 900 and the end
        ({"save_interval": 300, "save_at_end": False}, 0, [], 3, 3),
        ({"save_interval": 0}, 0, [], 1, 1),
        ({"save_interval": 0, "save_at_end": False}, 0, [], 0, 0),
        ({"keep_last": 2}, 0, [], 3, 3),  # and the one that is being written
        ({"keep_last": 20}, 0, [], 10, 10),
        ({"keep_last": 2, "keep_every": 500}, 0, [], 5, 5),
        # of the multiples of 250 training saves 500 and 1000
        ({"keep_last": 1, "keep_every": 250}, 0, [], 4, 4),
        ({"keep_last": 1, "keep_best": 2}, 0, [], 4, 4),
        ({}, 400, [100, 200, 300, 400], 10, 6),
        ({"keep_last": 2}, 400, [300, 400], 4, 2),  # the one that it continued from stays
        ({"keep_last": 2}, 400, [50, 100, 200, 300, 400], 5, 1),
        ({}, 1000, [1000], 1, 0),
    ],
)
def test_checkpoints_at_once(values, iteration, there, at_once, new):
    use = disk_use(config(**values), iteration=iteration, there=there, one_bytes=100)
    assert (use.num_checkpoints, use.num_new) == (at_once, new)
    assert use.needed_bytes == 100 * new + use.records_bytes


def test_keep_last_that_fits():
    one = disk_use(config()).one_bytes
    records = disk_use(config()).records_bytes
    for room, expected in ((1, 0), (2, 1), (4.5, 3), (100, 10)):
        assert keep_last_that_fits(config(), int(room * one) + records) == expected


FREE = namedtuple("FREE", "total used free")


@pytest.fixture
def disk(monkeypatch):
    def has(num_bytes: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda place: FREE(10**15, 0, int(num_bytes)))

    return has


def test_a_disk_that_cannot_hold_the_run(tmp_path, disk):
    def problems(**values: object) -> list[str]:
        return check_files(config(run_dir=str(tmp_path), run_name="x", data_dir=str(tmp_path), **values))

    one, needed = disk_use(config()).one_bytes, disk_use(config()).needed_bytes
    disk(needed)
    assert problems() == []
    disk(needed - 1)
    (line,) = problems()
    assert line.startswith(f"RUN_DIR={tmp_path}: {tmp_path} has ")
    assert "to reach iteration 1000: 10 new checkpoints of " in line
    assert "Fix: set KEEP_LAST=3, which fits, or choose" in line and "DISK_CHECK=one" in line
    for allowed in ({"keep_last": 3}, {"disk_check": "one"}, {"disk_check": "none"}, {"save_interval": 0}):
        assert problems(**allowed) == []
    disk(1.2 * one)
    (line,) = problems()
    assert "KEEP_LAST" not in line
    assert problems(disk_check="one") == []
    disk(checkpoint_bytes(config()) - 1)
    (line,) = problems(disk_check="one")
    assert "Fix: choose a RUN_DIR" in line
    assert problems(disk_check="none") == problems(save_interval=0, save_at_end=False) == []
    # Those that are there need no room any more.
    for iteration in range(100, 1000, 100):
        write_without_tensors(tmp_path / "x" / "checkpoints" / f"iter_{iteration:07d}")
    disk(1.5 * one)
    assert problems() == []


def test_a_run_that_goes_on_needs_room_for_its_next_checkpoint_only(tmp_path, disk):
    def room(**values: object) -> tuple[list[str], list[str]]:
        c = config(run_dir=str(tmp_path), run_name="x", data_dir=str(tmp_path), **values)
        return check_files(c), disk_warnings(c)

    one = disk_use(config()).one_bytes
    disk(1.5 * one)
    assert [len(lines) for lines in room()] == [1, 0]  # a first start
    write_without_tensors(tmp_path / "x" / "checkpoints" / "iter_0000100")
    refused, (warning,) = room()
    assert refused == []
    assert "to reach iteration 1000: 9 new checkpoints of " in warning
    assert "DISK_CHECK=one" in warning
    assert room(disk_check="one") == room(disk_check="none") == ([], [])
    disk(2.5 * one)
    assert room(keep_last=1) == ([], [])
    disk(one)  # and no room for records
    (line,), warnings = room()
    assert "for the next checkpoint and the records until then. Fix: free some space" in line
    assert warnings == []


def test_a_file_of_settings(tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text(to_yaml(config(run_dir=str(tmp_path), keep_last=2)))
    flags = ["--mtbf=1000", "--nodes=10", "--save-seconds=30", "--iteration-seconds=1"]
    assert main(["watch", "storage", str(path), *flags]) == 0
    text = capsys.readouterr().out
    assert "KEEP_LAST=2, KEEP_EVERY=0, KEEP_BEST=0" in text
    best = round(daly_interval(30, 360_000))
    assert f"{best} (Daly; {round(young_interval(30, 360_000))} by Young), loses " in text
    assert "100, loses 30.0" in text  # 30 s of saving in 100 s of work
    assert main(["watch", "storage", str(tmp_path)]) == 1
    assert "is neither a run folder nor a settings file. Fix: " in capsys.readouterr().err
    assert main(["watch", "storage", str(path), "--mtbf", "-1"]) == 1
    assert "MTBF=-1: must be a positive number. Fix: " in capsys.readouterr().err
    lines = path.with_suffix(".env")
    lines.write_text(f"export KEEP_LAST='2'\nPRESET=cpu\nRUN_DIR={tmp_path}\n")
    assert storage_of(lines).config.keep_last == 2


def test_a_run_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "iter_0000010").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config(run_dir=str(tmp_path))))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    found = storage_of(folder)
    assert (found.there, found.use.one_bytes, found.use.num_new) == ((10,), 7_000, 10)
    assert main(["watch", "storage", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["advice"]["mtbf_hours"] == 5.0
    assert report["measured"]["save_seconds"] == 50.0
    assert report["num_checkpoints"] == 11


@pytest.mark.slow
def test_records_of_a_real_run(session_runs):
    """The estimate is above what a run has written, and not far."""
    run = session_runs.succeed("records", TRAIN_ITERS=12)
    use = disk_use(load_config({}, session_runs.environ("records", TRAIN_ITERS=12)))
    files = (run.folder.metrics, *run.folder.tensorboard.rglob("*"))
    written = sum(path.stat().st_size for path in files if path.is_file())
    assert written < use.records_bytes < 3 * written
    (event,) = [event for event in run.records("event") if event["event"] == "checkpoint"]
    assert event["bytes"] < use.one_bytes < 1.5 * event["bytes"]
    assert storage_of(Path(run.folder.path)).measured.checkpoint_bytes == event["bytes"]


def test_events_without_a_time_or_with_odd_values_are_passed_over():
    event = {"kind": "event", "iteration": 1}
    times = (None, 7, "yesterday", [], "0001-01-01T00:00:00")
    odd = [{**event, "event": "hang", "time": time} for time in times]
    records = [
        {},
        {"kind": "train"},
        {"kind": "train", "iteration": 8, "elapsed_time_per_iteration_ms": 500},
        {"kind": "train", "iteration": "9", "elapsed_time_per_iteration_ms": "fast", "training_seconds": []},
        {**event, "event": "checkpoint"},
        {**event, "event": "checkpoint", "seconds": "long", "bytes": None},
        {**event, "event": "hang"},
        {"kind": "event"},
        *odd[:-1],
        {**event, "event": "rank_failed", "time": "2026-11-03T02:14:09+01:00"},
        {**event, "event": "resume", "time": "2026-11-03T02:15:09+01:00"},
    ]
    expected = Measured(iteration_seconds=0.5, num_failures=1, restart_seconds=60.0, iteration=8)
    assert measured(records) == expected
    measured(odd)
