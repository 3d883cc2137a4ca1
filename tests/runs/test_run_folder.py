"""The run folder: what is written at a start, and what is refused before anything is written."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from moe_exp.config import Config, ConfigError
from moe_exp.config.setting_types import shown
from moe_exp.host.files import write_atomically, write_json
from moe_exp.runs import run_folder
from moe_exp.runs.records import read_metrics
from moe_exp.runs.run_folder import RunFolder, hold_run_folder, open_run_folder, run_folder_problems


def config_in(tmp_path: Path, **settings: Any) -> Config:
    values: dict[str, Any] = {"run_dir": str(tmp_path / "runs"), "run_name": "a", "gpus_per_node": 1}
    return Config(**(values | settings))


def test_paths_are_those_of_the_documented_folder(tmp_path: Path) -> None:
    folder = RunFolder.of(config_in(tmp_path))
    assert folder.path == tmp_path / "runs" / "a" and not folder.path.exists()
    documented = run_folder.__doc__ or ""
    names = [str(path.relative_to(folder.path)) for path in vars(folder).values() if path != folder.path]
    first = {name: re.escape(name.partition("/")[0]) for name in names}
    assert {name for name in names if not re.search(rf"^ .*{first[name]}\b", documented, re.M)} == {".lock"}


def test_every_start_is_one_provenance_entry_with_what_it_changed(tmp_path: Path) -> None:
    open_run_folder(config_in(tmp_path), argv=["train.py", "--lr", "1e-3"])
    folder = open_run_folder(config_in(tmp_path, train_iters=50), argv=["train.py"])
    first, second = json.loads(folder.provenance.read_text())["starts"]
    assert first["command"] == ["train.py", "--lr", "1e-3"] and second["command"] == ["train.py"]
    assert first["changed_settings"] == {} and second["changed_settings"] == {"train_iters": [40000, 50]}
    assert {"python", "torch", "megatron-core"} <= set(first["versions"])
    assert first["host"] and first["time"] <= second["time"]
    assert yaml.safe_load(folder.config.read_text())["train_iters"] == 50
    assert folder.checkpoints.is_dir()
    assert not list(folder.path.glob(".*"))


def test_a_resume_with_other_settings_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = config_in(tmp_path, lr=0.001, train_iters=100)
    folder = open_run_folder(first, [])
    more = {"tp": 2, "save_interval": 7, "num_workers": 3, "valid_data": "v", "seed": 5}
    changed = config_in(tmp_path, lr=0.003, train_iters=100, **more)
    assert run_folder.changes_of_resume(changed) == []  # there is no checkpoint yet
    write_atomically(folder.checkpoints / run_folder.LATEST, "40")
    changes = ["LR 0.001 -> 0.003", "SEED 1234 -> 5", "VALID_DATA empty -> v", "TP 1 -> 2"]
    assert run_folder.changes_of_resume(changed) == changes
    line = f"resumed with changed settings: {', '.join(changes)}"
    with caplog.at_level(logging.INFO):
        open_run_folder(changed, [], resumed_from=40)
        open_run_folder(changed, [], resumed_from=40)  # as the start before: no more changes
        open_run_folder(first, [])  # from iteration 0: nothing is resumed
    assert [record.message for record in caplog.records] == [line]
    (event,) = read_metrics(folder.metrics)
    assert (event["event"], event["iteration"]) == ("changed_settings", 40)
    assert event["changes"] == changes


def test_a_longer_run_has_another_decay(tmp_path: Path) -> None:
    folder = open_run_folder(config_in(tmp_path, train_iters=300, decay_iters=300), [])
    write_atomically(folder.checkpoints / run_folder.LATEST, "300")
    assert run_folder.changes_of_resume(config_in(tmp_path, train_iters=300)) == []  # 0 stands for 300
    longer = run_folder.changes_of_resume(config_in(tmp_path, train_iters=600))
    assert longer == ["TRAIN_ITERS 300 -> 600", "DECAY_ITERS 300 -> 600"]


def test_the_environment_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "5ec4e7")
    monkeypatch.setenv("HARMLESS_NAME", "5ec4e7")
    folder = open_run_folder(config_in(tmp_path))
    written = "".join(path.read_text() for path in folder.path.iterdir() if path.is_file())
    assert '"versions"' in written and "5ec4e7" not in written and "HARMLESS_NAME" not in written


def test_commit_is_that_of_the_checkout_of_the_package_only(tmp_path, monkeypatch) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "venv").mkdir(parents=True)
    for name in ("ours.py", "venv/installed.py"):
        (checkout / name).write_text("")
    identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
    for arguments in (["init", "-q"], ["add", "ours.py"], [*identity, "commit", "-qm", "m"]):
        assert run_folder._git(checkout, *arguments) is not None
    commit = run_folder._git(checkout, "rev-parse", "HEAD")
    assert commit and len(commit) == 40
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setattr(run_folder, "__file__", str(checkout / "ours.py"))
    assert run_folder.provenance([])["commit"] == commit
    (checkout / "ours.py").write_text("changed")
    assert run_folder.provenance([])["commit"] == commit + "+changes"
    monkeypatch.setattr(run_folder, "__file__", str(checkout / "venv" / "installed.py"))
    assert run_folder.provenance([])["commit"] is None


def test_a_broken_provenance_is_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = open_run_folder(config_in(tmp_path))
    folder.provenance.write_text('{"starts": [')
    open_run_folder(config_in(tmp_path))
    assert len(json.loads(folder.provenance.read_text())["starts"]) == 1
    assert (folder.path / "provenance.json.broken").read_text() == '{"starts": ['
    assert "cannot read" in caplog.text


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"status": "stopped"})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "half")
    assert json.loads(path.read_text()) == {"status": "stopped"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_run_has_no_problems_and_nothing_is_made(tmp_path: Path) -> None:
    assert run_folder_problems(config_in(tmp_path, run_dir=str(tmp_path / "x" / "y"))) == []
    assert list(tmp_path.iterdir()) == []


def test_the_same_model_may_go_on_with_other_settings(tmp_path: Path) -> None:
    open_run_folder(config_in(tmp_path, num_experts=8))
    other = {"ep": 2, "gpus_per_node": 2, "lr": 1e-3, "seq_len": 1024, "head_dim": 128}
    other["moe_ffn_hidden_size"] = 1792
    assert run_folder_problems(config_in(tmp_path, num_experts=8, **other)) == []


@pytest.mark.parametrize(
    ("other", "allowed", "start"),
    [
        ({"optimizer": "sgd"}, "allow_other_optimizer", "OPTIMIZER=sgd: {} has OPTIMIZER=adam. Fix: "),
        ({"activation": "geglu"}, "allow_other_model", "ACTIVATION=geglu: "),
    ],
    ids=["optimizer", "activation"],
)
def test_another_optimizer_or_model_only_where_it_is_allowed(
    tmp_path: Path, other: dict[str, str], allowed: str, start: str
) -> None:
    folder = open_run_folder(config_in(tmp_path, activation="swiglu"))
    config = config_in(tmp_path, **{"activation": "swiglu"} | other)
    assert run_folder_problems(config) == []  # nothing was trained
    (folder.checkpoints / run_folder.LATEST).write_text("10")
    (line,) = run_folder_problems(config)
    assert line.startswith(start.format(folder.path))
    assert run_folder_problems(config.model_copy(update={allowed: True})) == []
    assert config_in(tmp_path, optimizer="sgd", run_name="").name.endswith("_OPTIMIZER_sgd")


def test_every_differing_model_setting_is_named_with_both_values(tmp_path: Path) -> None:
    folder = open_run_folder(config_in(tmp_path, num_experts=8))
    problems = run_folder_problems(config_in(tmp_path, num_experts=16, hidden_size=256, qk_norm=True))
    now = {"HIDDEN_SIZE": 256, "HEAD_DIM": 64, "QK_NORM": True, "NUM_EXPERTS": 16}
    before = {"HIDDEN_SIZE": 512, "HEAD_DIM": 128, "QK_NORM": False, "NUM_EXPERTS": 8}
    assert [line.partition(". Fix: ")[0] for line in problems] == [
        f"{name}={now[name]}: {folder.path} contains a model with {name}={before[name]}" for name in now
    ]
    assert "set HIDDEN_SIZE=512 to continue" in problems[0]


def test_experts_do_not_matter_to_a_dense_run(tmp_path: Path) -> None:
    open_run_folder(config_in(tmp_path, use_moe=False, num_experts=8))
    assert run_folder_problems(config_in(tmp_path, use_moe=False, num_experts=16)) == []
    (line,) = run_folder_problems(config_in(tmp_path, use_moe=True))
    assert line.startswith("USE_MOE=True: ") and "contains a model with USE_MOE=False" in line


ODD_SIZES = "use_moe: true\nnum_heads: x\nhidden_size: 8\nhead_dim: 0\n"


@pytest.mark.parametrize("text", ["a: [", "only text", "", ODD_SIZES, "\x00", "[" * 100_000], ids=range(6))
def test_an_unreadable_config_is_refused(tmp_path: Path, text: str) -> None:
    folder = open_run_folder(config_in(tmp_path))
    folder.config.write_text(text)
    (line,) = run_folder_problems(config_in(tmp_path))
    assert line.startswith(f"RUN_NAME=a: {folder.config} cannot be read (") and "\n" not in line


def test_a_folder_or_a_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # os.access is replaced because root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    (line,) = run_folder_problems(config_in(tmp_path))
    assert line.startswith("RUN_DIR=") and f": {tmp_path} is not writable. Fix: " in line
    folder = open_run_folder(config_in(tmp_path))
    folder.metrics.write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder.metrics)
    (line,) = run_folder_problems(config_in(tmp_path))
    assert f"{folder.metrics} is not writable" in line


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    (line,) = run_folder_problems(config_in(tmp_path))
    assert f"{tmp_path / 'runs'} is a file, not a folder" in line
    with pytest.raises(ConfigError, match=r"RUN_DIR=.*cannot write to "):
        open_run_folder(config_in(tmp_path))


FILES = ("EXIT", "metrics.jsonl", "train.log", ".lock", "config.yaml")


@pytest.mark.parametrize(
    ("name", "kind", "make"),
    [
        *((name, "file", make) for name in FILES for make in (Path.mkdir, os.mkfifo)),
        *((name, "folder", Path.touch) for name in ("tensorboard", "checkpoints")),
    ],
)
def test_a_path_of_the_wrong_kind(tmp_path: Path, name: str, kind: str, make: Any) -> None:
    path = tmp_path / "runs" / "a" / name
    path.parent.mkdir(parents=True)
    make(path)
    (line,) = run_folder_problems(config_in(tmp_path))
    assert line.startswith(f"RUN_NAME=a: {path} is not a {kind}. Fix: ")


@pytest.mark.parametrize(("name", "rule"), [("../b", "inside"), ("/b", "inside"), ("x" * 256, "255 bytes")])
def test_a_name_that_is_no_folder_name(tmp_path: Path, name: str, rule: str) -> None:
    (line,) = run_folder_problems(config_in(tmp_path, run_name=name))
    assert line.startswith(f"RUN_NAME={shown(name)}: ") and rule in line


def test_a_second_run_in_one_folder_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    program = f"""
from moe_exp.config import load_config
from moe_exp.runs.run_folder import hold_run_folder
hold_run_folder(load_config({config.model_dump()!r}, {{}}))
print("held", flush=True)
input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen([sys.executable, "-c", program], **pipes)
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    text = f"RUN_NAME=a: another run is writing to {config.run_dir}/a. Fix: "
    (line,) = run_folder.lock_problems(config)
    assert line.startswith(text)
    assert (
        run_folder.lock_problems(config.model_copy(update={"node_rank": 1})) == []
    )  # another node of the same run
    assert run_folder_problems(config) == []  # whoever submits jobs behind the one that runs
    with pytest.raises(ConfigError, match=re.escape(text)):
        hold_run_folder(config)
    first.communicate("\n", timeout=30)
    assert run_folder.lock_problems(config) == []


def test_a_run_starts_while_a_check_has_the_lock_for_a_moment(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    lock = FileLock(open_run_folder(config).lock, thread_local=False)  # released by another
    lock.acquire()
    threading.Timer(0.3, lock.release).start()
    hold_run_folder(config)
    assert run_folder.release_run_folders() == 1
    hold_run_folder(config)
