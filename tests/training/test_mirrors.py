"""TensorBoard, wandb and Prometheus: what is read back equals metrics.jsonl, also after a resume."""

import gc
import json
import logging
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_metrics import train_record

from helpers.checkpoint.file_limit import no_file_over
from moe_exp.checkpoint.state import Progress
from moe_exp.config import Config, ConfigError
from moe_exp.runs.records import read_metrics
from moe_exp.runs.run_folder import RunFolder, open_run_folder
from moe_exp.training import mirrors
from moe_exp.training.console import setup_logging
from moe_exp.training.metrics import Metrics, curves
from moe_exp.training.mirrors import Prometheus

SECRET = "0123456789abcdef" * 2 + "5ec4e700"


def expected_curves(folder: RunFolder) -> dict[str, dict[int, float]]:
    """Name to value by iteration, of the records of metrics.jsonl."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for record in read_metrics(folder.metrics):
        if record["kind"] != "event":
            for name, value in curves(record).items():
                found[name][record["iteration"]] = value
    return dict(found)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that dies at iteration 60 and continues from 40 with other values."""
    wandb = pytest.importorskip("wandb")
    place = {"run_dir": str(tmp_path_factory.mktemp("runs")), "run_name": "a", "gpus_per_node": 1}
    config = Config(**place, wandb_project="p", wandb_mode="offline", tensorboard_axes=True)
    folder = open_run_folder(config)
    _write(config, folder, 0, (20, 40, 60), loss=10.0)
    # Files are ordered by the second of their start; two starts of a real run are seconds apart.
    time.sleep(1.0 - time.time() % 1.0)
    _write(config, folder, 40, (60, 80), loss=7.0)
    # wandb's own process may still be writing when `finish` returns.
    wandb.teardown()
    return folder


def _write(
    config: Config, folder: RunFolder, start_iteration: int, iterations: tuple[int, ...], *, loss: float
) -> None:
    with Metrics(config, folder, start_iteration) as writer:
        for iteration in iterations:
            place = {"iteration": iteration, "consumed_samples": iteration * 64}
            place |= {"consumed_tokens": iteration * 64 * 2048, "consumed_flops": iteration * 10**12}
            timers = {"data": 1.5, "forward_backward": 60.0, "experts": 20.25}
            writer.train(train_record(lm_loss=loss + iteration / 100, timers=timers, **place))
            writer.valid(Progress(**place), loss + 1)


def tensorboard_events(path: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def tensorboard_scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    events = tensorboard_events(path)
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def test_tensorboard_equals_metrics_jsonl_after_a_resume(resumed):
    expected = {
        mirrors.tensorboard_name(name): [(i, float(np.float32(value))) for i, value in by_iteration.items()]
        for name, by_iteration in expected_curves(resumed).items()
    }
    found = tensorboard_scalars(resumed.tensorboard)
    assert found == expected
    of_layers = {"train_moe/layer_02/max_over_mean", "train_moe/layer_01/seq_aux_loss"}
    assert {"train/lm_loss", "valid/lm_loss", "train_perf/tflops_per_gpu"} | of_layers <= set(found)
    assert min(found).startswith("train/")
    assert [step for step, _ in found["train/lm_loss"]] == [20, 40, 60, 80]


def test_prometheus_has_the_newest_values(tmp_path, monkeypatch):
    path = tmp_path / "run.prom"
    config = Config(run_dir=str(tmp_path), run_name='a"b', num_layers=2, prometheus_file=str(path))
    monkeypatch.setattr(time, "time", lambda: 1e9)
    mirror = Prometheus(config)
    layers = {"moe/layer_01/max_over_mean": 1.5, "moe/layer_02/max_over_mean": 2.0}
    mirror.write({"train/lm_loss": 4.5, "train/grad_norm": math.inf, **layers}, {"iteration": 20})
    mirror.write({"train/lm_loss": math.nan}, {"iteration": 40, "tokens": 81920})
    mirror.write({"valid/lm_loss": 4.25}, {"iteration": 40, "tokens": 81920})
    types, values = [], []
    for line in path.read_text().splitlines():
        (types if line.startswith("# TYPE ") else values).append(line)
    assert values == [
        'moe_exp_consumed_tokens{run="a\\"b"} 81920.0', 'moe_exp_iteration{run="a\\"b"} 40.0',
        'moe_exp_last_record_timestamp_seconds{run="a\\"b"} 1000000000.0',
        'moe_exp_layer_max_over_mean{run="a\\"b",layer="1"} 1.5',
        'moe_exp_layer_max_over_mean{run="a\\"b",layer="2"} 2.0',
        'moe_exp_train_grad_norm{run="a\\"b"} +Inf', 'moe_exp_train_lm_loss{run="a\\"b"} NaN',
        'moe_exp_valid_lm_loss{run="a\\"b"} 4.25',
    ]  # fmt: skip
    assert types[3] == "# TYPE moe_exp_layer_max_over_mean gauge" and len(types) == 7
    assert [file.name for file in tmp_path.iterdir()] == ["run.prom"]


def test_a_prometheus_file_that_cannot_be_written_is_reported_once(tmp_path, caplog):
    mirror = Prometheus(Config(prometheus_file=str(tmp_path / "gone" / "run.prom")))
    for iteration in (1, 2):
        mirror.write({"train/lm_loss": 1.0}, {"iteration": iteration})
    assert [record.message.partition(": ")[2][:17] for record in caplog.records] == ["cannot be written"]
    (tmp_path / "gone").mkdir()
    mirror.write({"train/lm_loss": 1.0}, {"iteration": 3})
    assert "moe_exp_iteration" in (tmp_path / "gone" / "run.prom").read_text()


@pytest.mark.parametrize(
    ("unit", "key", "factor"),
    [
        ("tokens", "consumed_tokens", 1),
        ("gflops", "consumed_flops", 1e-9),
        ("milliseconds", "training_seconds", 1e3),
    ],
)
def test_tensorboard_has_the_losses_over_other_axes(resumed, unit, key, factor):
    expected: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in read_metrics(resumed.metrics):
        if record["kind"] != "event":
            point = (round(record[key] * factor), float(np.float32(record["lm_loss"])))
            expected[f"{record['kind']}/lm_loss_by_{unit}"].append(point)
    assert tensorboard_scalars(resumed.tensorboard / f"by_{unit}") == expected


@pytest.mark.parametrize(
    ("use_moe", "moe_type", "group"), [(False, "moe", "dense"), (True, "moe", "moe"), (True, "dmoe", "dmoe")]
)
def test_tensorboard_has_settings_and_group(config, folder, use_moe, moe_type, group):
    config = config.model_copy(update={"use_moe": use_moe, "moe_type": moe_type})
    Metrics(config, folder).close()
    events = tensorboard_events(folder.tensorboard)
    (tag,), (settings,) = events.Tensors("group/text_summary"), events.Tensors("config/text_summary")
    assert tag.tensor_proto.string_val == [group.encode()]
    assert b"    num_experts: 8\n" in settings.tensor_proto.string_val[0]
    assert not [path for path in folder.tensorboard.iterdir() if path.is_dir()]  # no by_* unless asked for
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["num_experts"].number_value == 8 and values["use_moe"].string_value == str(use_moe).lower()
    assert values["moe_type"].string_value == moe_type and "run_dir" not in values


def wandb_history(path: Path) -> Iterator[dict[str, Any]]:
    """Of an offline run: a header of 7 bytes, blocks of 32 KiB with (crc, length, type) before each piece."""
    from wandb.proto import wandb_internal_pb2

    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or the last piece
            record, message = wandb_internal_pb2.Record.FromString(message), b""
            if record.HasField("history"):
                yield {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }


def test_wandb_offline_equals_metrics_jsonl_after_a_resume(resumed):
    (file,) = resumed.wandb.glob("offline-run-*/*.wandb")
    assert file.name == f"run-{(resumed.wandb / 'run_id').read_text()}.wandb"
    assert len(list((resumed.wandb / "replaced").glob("offline-run-*/*.wandb"))) == 1
    found: dict[str, dict[int, float]] = defaultdict(dict)
    seen = []
    for row in wandb_history(file):
        for name, value in row.items():
            if not name.startswith("_") and name not in mirrors.AXES:
                found[name][row["iteration"]] = value
        seen.append((row["iteration"], "train/lm_loss" in row))
        assert {"iteration", "tokens", "flops", "seconds"} <= set(row)
        assert row["tokens"] == row["iteration"] * 64 * 2048
    assert found == expected_curves(resumed)
    assert seen == [(iteration, is_train) for iteration in (20, 40, 60, 80) for is_train in (True, False)]
    record = file.read_bytes()
    assert b"num_experts" in record and b"dmoe" in record and b"tokens" in record


def test_what_wandb_has_is_not_sent_again(tmp_path, caplog):
    """Online, a resumed run comes with the summary of what the earlier start has sent."""
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", project="p", dir=str(tmp_path))
    run.log({"iteration": 60, "train/lm_loss": 3.0})
    mirror = mirrors._Wandb(run)
    for iteration in (40, 60, 80):
        mirror.write({"train/lm_loss": 1.0}, {"iteration": iteration})
    mirror.close(failed=False)
    wandb.teardown()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert [(row["iteration"], row["train/lm_loss"]) for row in wandb_history(file)] == [(60, 3.0), (80, 1.0)]


@pytest.mark.usefixtures("clean_logging")
def test_keys_reach_no_file_and_no_line(config, tmp_path, monkeypatch, capfd):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    config = config.model_copy(update={"wandb_project": "p", "wandb_mode": "offline"})
    folder = open_run_folder(config, ["moe-exp", "train"])
    setup_logging(folder, rank=0)
    _write(config, folder, 0, (20, 40), loss=10.0)
    wandb.teardown()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "provenance.json", "train.log", "metrics.jsonl"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in "".join(capfd.readouterr())


def test_a_mirror_that_fails_does_not_end_the_run(config, folder, caplog):
    with Metrics(config, folder) as writer:
        (tensorboard,) = writer._mirrors
        tensorboard._writer = None  # what is left after its files went away
        for iteration in (20, 40):
            writer.train(train_record(iteration=iteration))
    assert [record["iteration"] for record in read_metrics(folder.metrics)] == [0, 20, 40]
    assert caplog.text.count("TensorBoard failed and receives no further records: AttributeError") == 1


@pytest.mark.parametrize("num_bytes", [10, 2500, 4000])
def test_a_full_disk_ends_tensorboard_alone(config, folder, num_bytes, caplog):
    """At its start, in its first records and later; pytest takes a traceback of its threads for an error."""
    with no_file_over(num_bytes), Metrics(config, folder) as writer:
        for iteration in range(20, 820, 20):
            writer.train(train_record(iteration=iteration))
    with Metrics(config, folder, 800) as writer:
        writer.event("end", 800)
    gc.collect()
    warnings = [record.getMessage() for record in caplog.records if "TensorBoard" in record.getMessage()]
    assert len(warnings) == 1 and "File too large" in warnings[0]


def test_without_tensorboard_one_line_says_so(config, folder, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.INFO, logger="moe_exp"), Metrics(config, folder) as writer:
        writer.train(train_record())
    assert caplog.text.count("tensorboard is not installed (pip install tensorboard)") == 1
    assert len(read_metrics(folder.metrics)) == 2 and not folder.tensorboard.exists()


def test_wandb_missing_says_what_to_install(config, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    wanted = config.model_copy(update={"wandb_project": "p"})
    with pytest.raises(ConfigError, match=r"^WANDB_PROJECT=p: .* Fix: run `pip install moe-exp\[wandb\]`"):
        Metrics(wanted, folder)
    for off in (config, wanted.model_copy(update={"wandb_mode": "disabled"})):
        Metrics(off, folder).close()


def test_wandb_that_cannot_start_is_one_line(config, folder, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError(f"no key\nfound in {SECRET}")

    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    wanted = config.model_copy(update={"wandb_project": "p"})
    rule = r"^WANDB_MODE=online: .*\(no key found in the key\)\. Fix: .*WANDB_MODE=offline"
    with pytest.raises(ConfigError, match=rule):
        Metrics(wanted, folder)
