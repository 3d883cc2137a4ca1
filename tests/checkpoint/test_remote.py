"""The copy of a run at an object store: what is sent, kept and fetched; moto's S3 server."""

import json
import shutil
from unittest.mock import Mock

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from helpers.checkpoint.ckpt_files import entries_of
from helpers.whole_runs import TINY
from moe_exp.checkpoint import remote
from moe_exp.checkpoint.format.folders import Manifest, iteration_folder, publish
from moe_exp.checkpoint.remote import Uploads, fetch_load_dir, fetch_run, newest_there, send_checkpoint
from moe_exp.config import load_config
from moe_exp.host.object_store import Store
from moe_exp.launch.machine_checks import check_files
from moe_exp.runs.run_folder import RunFolder
from moe_exp.studies.compare.comparison import Comparison, Options


def run_with_checkpoints(url, tmp_path, name="run", **settings):
    """Config and folder of a run that copies to a store, without training."""
    given = {"RUN_DIR": tmp_path / "runs", "RUN_NAME": name, "REMOTE_DIR": f"{url}/runs", **settings}
    config = load_config({}, {**TINY, **{key: str(value) for key, value in given.items()}})
    return config, RunFolder.of(config)


def save(run, iteration, text="x", valid_loss=None):
    folder = iteration_folder(run.checkpoints, iteration)
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(parents=True)
    (partial / "metadata.json").write_text(text)
    Manifest(iteration, entries_of(partial), {"valid_loss": valid_loss}).write(partial)
    publish(partial, iteration)
    run.metrics.write_text(f"history up to {iteration}")


def iterations_there(url):
    names = Store(f"{url}/runs/run/checkpoints").files()
    return sorted({name.partition("/")[0] for name in names if "/" in name})


def test_retention_there(url, tmp_path):
    config, run = run_with_checkpoints(url, tmp_path, KEEP_LAST=1, KEEP_BEST=1)
    for iteration, loss in ((100, 1.0), (200, 0.5), (300, 2.0)):
        save(run, iteration, valid_loss=loss)
        send_checkpoint(config, iteration)
    assert iterations_there(url) == ["iter_0000200", "iter_0000300"]
    # one that was not copied to its end
    Store(f"{url}/runs/run/checkpoints/iter_0000250").write("metadata.json", b"half")
    # Back to 100, as what is newer is damaged here, or was given up: the good copies stay.
    shutil.rmtree(run.checkpoints)
    save(run, 100, valid_loss=1.0)
    send_checkpoint(config, 100)
    assert iterations_there(url) == ["iter_0000100", "iter_0000200", "iter_0000300"]
    assert newest_there(f"{url}/runs/run/checkpoints") == 100
    save(run, 310, valid_loss=1.5)
    send_checkpoint(config, 310)
    assert iterations_there(url) == ["iter_0000200", "iter_0000310"]


def test_a_fetch_that_is_killed_loses_no_history(url, tmp_path, monkeypatch):
    config, run = run_with_checkpoints(url, tmp_path)
    save(run, 100)
    send_checkpoint(config, 100)
    shutil.rmtree(run.path)
    with monkeypatch.context() as patch:
        patch.setattr(remote.folders, "publish", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fetch_run(config)
    fetch_run(config)
    assert run.metrics.read_text() == "history up to 100"
    assert (run.checkpoints / "iter_0000100/metadata.json").read_text() == "x"


def test_only_what_came_damaged_is_fetched_again(url, tmp_path, monkeypatch):
    config, run = run_with_checkpoints(url, tmp_path)
    save(run, 100)
    large = run.checkpoints / "iter_0000100" / "__0_0.distcp"
    large.write_bytes(b"weights")
    Manifest(100, entries_of(large.parent), {}).write(large.parent)
    send_checkpoint(config, 100)
    shutil.rmtree(run.path)
    there = Store(f"{url}/runs/run/checkpoints/iter_0000100")
    there.write("metadata.json", b"y")
    abandoned = run.checkpoints / "iter_0000050.fetched"
    abandoned.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"the download is damaged.*metadata\.json: has changed"):
        fetch_run(config)
    assert not list(run.checkpoints.glob("iter_???????"))
    there.write("metadata.json", b"x")
    fetched, download = [], Store.download
    monkeypatch.setattr(Store, "download", lambda self, *a: (fetched.append(a[0]), download(self, *a)))
    fetch_run(config)
    assert fetched == ["metadata.json"] and large.read_bytes() == b"weights"
    assert not abandoned.exists()


def test_a_run_that_has_gone_on_elsewhere_is_not_turned_back(url, tmp_path):
    config, run = run_with_checkpoints(url, tmp_path)
    save(run, 100)
    other, there = run_with_checkpoints(url, tmp_path / "other")
    save(there, 5000)
    send_checkpoint(other, 5000)
    (line,) = [line for line in check_files(config) if line.startswith("REMOTE_DIR")]
    assert "has a checkpoint at iteration 5000, but" in line and "Fix: remove" in line
    # one that this run itself has written, and went back from
    run.metrics.write_text(json.dumps({"kind": "event", "event": "checkpoint", "iteration": 5000}) + "\n")
    assert not [line for line in check_files(config) if line.startswith("REMOTE_DIR")]


def test_load_dir_is_the_checkpoint_of_its_url(url, tmp_path):
    for name in "xy":
        config, run = run_with_checkpoints(url, tmp_path, name)
        save(run, 7, text=name)
        send_checkpoint(config, 7)
    for name in "xyx":
        config, _ = run_with_checkpoints(url, tmp_path, "z", LOAD_DIR=f"{url}/runs/{name}")
        assert (fetch_load_dir(config) / "metadata.json").read_text() == name
    # written anew since
    config, run = run_with_checkpoints(url, tmp_path, "x")
    save(run, 7, text="X")
    send_checkpoint(config, 7)
    config, _ = run_with_checkpoints(url, tmp_path, "z", LOAD_DIR=f"{url}/runs/x/checkpoints/iter_0000007")
    assert (fetch_load_dir(config) / "metadata.json").read_text() == "X"


def test_an_error_of_any_kind_does_not_end_the_uploads(url, tmp_path, monkeypatch):
    config, _ = run_with_checkpoints(url, tmp_path)
    uploads = Uploads(config)

    monkeypatch.setattr(remote, "send_checkpoint", Mock(side_effect=[RuntimeError("no new thread"), 10]))
    for iteration in (1, 2):
        uploads.add(iteration)
        uploads.wait()
    assert uploads.held() == set()
    events = [(kind, iteration) for kind, iteration, _ in uploads.events()]
    assert events == [("upload_failed", 1), ("upload", 2)]


def test_children_of_studies_have_places_of_their_own(tmp_path):
    flags = {"preset": "cpu", "run_dir": str(tmp_path), "remote_dir": "s3://bucket/runs"}
    for name in ("one", "two"):
        study = Comparison.of(Options(runs="dmoe,dense"), {**flags, "run_name": name}, {})
        places = {remote.remote_run(run.config) for run in study.runs()}
        assert places == {f"s3://bucket/runs/{name}/dmoe", f"s3://bucket/runs/{name}/dense"}
