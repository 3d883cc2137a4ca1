"""metrics.jsonl and its mirrors: Megatron's console line, TensorBoard, wandb, train.log."""

import json
import logging
import math
import os
import pty
import re
import socket
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from helpers.checkpoint.file_limit import no_file_over
from moe_exp.checkpoint.hf.exporting import exports_as
from moe_exp.checkpoint.state import Progress
from moe_exp.host.devices import device_label
from moe_exp.runs import records
from moe_exp.runs.records import iter_metrics, read_metrics
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training import console
from moe_exp.training.console import console_line, progress_line, terminal_line, validation_lines
from moe_exp.training.metrics import Metrics

EXAMPLE = (
    "[2024-10-24 21:02:27] iteration       40/   40000 | consumed samples:         2560 | elapsed time per"
    " iteration (ms): 235.9 | throughput per GPU (TFLOP/s/GPU): 82.4 | learning rate: 2.400000E-05 | global"
    " batch size:    64 | lm loss: 1.081154E+01 | load_balancing_loss: 1.315762E+00 | loss scale: 1.0 | grad"
    " norm: 2.226 | num zeros: 56775512.0 | params norm: 315.029 | number of skipped iterations:   0 | number"
    " of nan iterations:   0 |"
)
NOW = datetime(2024, 10, 24, 21, 2, 27)


def train_record(**changes: Any) -> dict[str, Any]:
    """What the training loop hands to Metrics."""
    first = {
        "layer": 1, "tokens_per_expert": [60, 68], "max_over_mean": 1.0625, "microbatch_max_over_mean": 1.5,
        "max_vio": 0.25, "dead_fraction": 0.0, "dropped_fraction": 0.0, "experts_per_token": 2.0,
        "router_entropy": 0.69, "top1_weight": 0.75, "load_balancing_loss": 1.1, "z_loss": 0.2,
        "aux_losses": {"seq_aux_loss": 1.25},
    }  # fmt: skip
    second = {"layer": 2, "tokens_per_expert": [128, 0], "max_over_mean": 2.0, "max_vio": 1.0}
    second |= {"microbatch_max_over_mean": 2.0, "router_entropy": 0.5, "aux_losses": {"seq_aux_loss": 1.15}}
    return {
        "iteration": 40, "consumed_samples": 2560, "consumed_tokens": 5242880, "consumed_flops": 9 * 10**15,
        "global_batch_size": 64, "lm_loss": 10.81154, "load_balancing_loss": 1.315762, "z_loss": 0.25,
        "mtp_loss": None, "mtp_losses": [],
        "aux_losses": {"seq_aux_loss": 1.2}, "learning_rate": 2.4e-5, "grad_norm": 2.226,
        "num_zeros": 56775512, "params_norm": 315.029, "max_attention_logits": None, "loss_scale": 1.0,
        "elapsed_time_per_iteration_ms": 235.9, "tokens_per_second": 555600.4, "tflops_per_gpu": 82.4,
        "eta_seconds": 83.2, "skipped_iterations": 0, "nan_iterations": 0, "memory_allocated_bytes": None,
        "peak_memory_bytes": 401_000_000, "experts": [first, first | second], "timers": None,
    } | changes  # fmt: skip


def numbers(folder: RunFolder) -> list[dict[str, Any]]:
    """The train and valid records."""
    return [record for record in read_metrics(folder.metrics) if record["kind"] != "event"]


def test_console_line_is_megatrons_byte_for_byte():
    assert console_line(train_record(z_loss=None), 40000, NOW) == EXAMPLE


def test_console_line_leaves_out_what_has_no_value():
    loss = " load_balancing_loss: 1.315762E+00 | z_loss: 2.500000E-01 | loss scale: 1.0 |"
    assert loss in console_line(train_record(), 40000, NOW)
    gone = dict.fromkeys(("load_balancing_loss", "z_loss", "num_zeros", "tflops_per_gpu"))
    pattern = r" load_balancing_loss: \S+ \|| num zeros: \S+ \|| throughput per GPU \(TFLOP/s/GPU\): \S+ \|"
    expected = re.sub(pattern, "", EXAMPLE).replace("1.081154E+01", "NAN")
    assert console_line(train_record(**gone, lm_loss=math.nan), 40000, NOW) == expected


def test_runs_without_z_loss_have_no_such_value(config, folder):
    for iteration, changes in enumerate([{}, {"z_loss_coeff": 1e-3}]):
        with Metrics(config.model_copy(update=changes), folder, iteration) as writer:
            writer.train(train_record(iteration=iteration + 1))
    assert [record["z_loss"] for record in numbers(folder)] == [None, 0.25]


def test_progress_line():
    start = "eta 0:01:23, 555600 tokens/s"
    balance = "experts max/mean 2.00 (layer 2), 2.00 within a micro-batch, MaxVio 1.00"
    assert progress_line(train_record()) == f"{start}, {balance}"
    assert progress_line(train_record(experts=[])) == start
    full = train_record()["experts"][0] | {"dropped_fraction": 0.125}
    assert progress_line(train_record(experts=[full])).endswith("MaxVio 0.25, dropped up to 12.5%")


def test_terminal_lines_fit_80_columns():
    def line(total: int = 40000, **changes: Any) -> str:
        return terminal_line({"kind": "train"} | train_record(**changes), total)

    assert line() == "step    40/40000  loss 10.8115   556K tokens/s  eta 0:01:23  expert max 2.00x"
    dense = {"experts": [], "tokens_per_second": 9588.4, "lm_loss": None, "nan_iterations": 3}
    assert line(300, **dense) == "step  40/300  loss nan  3 nan  9,588 tokens/s  eta 0:01:23"
    long = {"iteration": 476838, "eta_seconds": 12.2 * 86400, "skipped_iterations": 2}
    # no room for the experts
    expected = "step 476838/476838  loss 10.8115  2 skipped     2M tokens/s  eta  12d 4h"
    assert line(476838, **long, tokens_per_second=2e6) == expected
    valid = {"kind": "valid", "iteration": 40, "lm_loss": 4.5, "lm_loss_ppl": 90.017}
    shown = "step  40/300  validation loss 4.5000  perplexity 90.02"
    assert terminal_line(valid | {"lm_loss_bits_per_byte": 1.25}, 300) == f"{shown}  1.250 bits per byte"
    averaged = valid | {"lm_loss_bits_per_byte": None, "ema_lm_loss": 4.25}
    assert terminal_line(averaged, 300) == f"{shown}  averaged weights 4.2500"


def test_validation_lines_are_megatrons():
    line = " validation loss at iteration 100 | lm loss value: 4.512345E+00 | lm loss PPL: 9.113000E+01 | "
    record, ruler = {"iteration": 100, "lm_loss": 4.512345, "lm_loss_ppl": 91.13}, "-" * (len(line) + 1)
    assert validation_lines(record) == [ruler, line, ruler]
    assert validation_lines(record | {"ema_lm_loss": 4.25})[1] == f"{line}ema lm loss value: 4.250000E+00 | "


def test_records_on_disk_at_once_with_exactly_the_documented_keys(config, folder):
    writer = Metrics(config, folder)
    writer.train(train_record())
    consumed = {"consumed_samples": 2560, "consumed_tokens": 5242880, "consumed_flops": 9 * 10**15}
    writer.valid(Progress(40, **consumed), 2.0, ema_lm_loss=1.5, bytes_per_token=4.0)
    writer.event("checkpoint", 40, path="iter_0000040")
    start, train, valid, event = read_metrics(folder.metrics)
    assert (start["kind"], start["event"], start["iteration"]) == ("event", "start", 0)
    consumed["training_seconds"] = pytest.approx(40 * 0.2359)
    assert train == {"kind": "train", **train_record(), **consumed, "z_loss": None}
    assert set(train) == {"kind", *records.TRAIN_KEYS}
    assert all(set(layer) == set(records.EXPERT_KEYS) for layer in train["experts"])
    losses = {"lm_loss": 2.0, "lm_loss_ppl": math.exp(2), "lm_loss_bits_per_byte": 0.5 / math.log(2)}
    assert valid == {"kind": "valid", "iteration": 40, **consumed, **losses, "ema_lm_loss": 1.5}
    assert set(valid) == {"kind", *records.VALID_KEYS}
    assert (event["event"], event["path"]) == ("checkpoint", "iter_0000040")
    assert datetime.fromisoformat(event["time"]).tzinfo
    writer.close()


def test_nan_infinity_and_array_values_stay_valid_json(config, folder):
    values = {"lm_loss": math.nan, "grad_norm": np.float32("inf"), "params_norm": np.float32(0.5)}
    layer = train_record()["experts"][0]
    layer |= {"router_entropy": math.nan, "tokens_per_expert": np.array([3, 4])}
    with Metrics(config, folder) as writer:
        writer.train(train_record(**values, experts=[layer]))
        writer.valid(Progress(40), math.nan)
    lines = folder.metrics.read_text().splitlines()
    _, train, valid = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (train["lm_loss"], train["grad_norm"], train["params_norm"]) == (None, None, 0.5)
    (layer,) = train["experts"]
    assert (layer["router_entropy"], layer["tokens_per_expert"]) == (None, [3, 4])
    assert (valid["lm_loss"], valid["lm_loss_ppl"]) == (None, None)


def test_a_record_after_half_a_line_is_a_line_of_its_own(folder):
    folder.metrics.write_text('{"kind": "event", "iteration": 1, "ev')
    records.append_event(folder.metrics, "end", 3, status="failed")
    assert [record["event"] for record in read_metrics(folder.metrics)] == ["end"]


def test_records_wait_for_room_on_a_full_disk(config, folder, caplog):
    with Metrics(config, folder) as writer:
        writer.event("start", 0, note="x" * 100_000)  # so that TensorBoard's files stay far below the limit
        whole = folder.metrics.read_bytes()
        with no_file_over(len(whole) + 50):
            writer.event("checkpoint", 20)
            writer.event("checkpoint", 40)
            assert folder.metrics.read_bytes() == whole
        writer.event("checkpoint", 60)
    assert [record["iteration"] for record in read_metrics(folder.metrics)[2:]] == [20, 40, 60]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert f"cannot write to {folder.metrics} (File too large)" in warning


def test_a_resume_removes_later_records_and_a_broken_last_line(config, folder):
    with Metrics(config, folder) as writer:
        for iteration in (20, 40, 60):
            writer.train(train_record(iteration=iteration))
        writer.valid(Progress(60), 1.0)
        writer.event("checkpoint_failed", 60)
    with folder.metrics.open("a") as file:
        file.write('{"kind": "train", "itera')
    with Metrics(config, folder, start_iteration=40) as writer:
        writer.train(train_record(iteration=60, lm_loss=7.0))
    found = read_metrics(folder.metrics)
    assert [(record["kind"], record["iteration"]) for record in found] == [
        ("event", 0), ("train", 20), ("train", 40), ("event", 60), ("event", 40), ("train", 60),
    ]  # fmt: skip
    assert found[3]["event"] == "checkpoint_failed"  # it is the history of the run, its curve is not
    assert found[4]["event"] == "resume" and found[4]["num_removed_records"] == 2
    assert found[4]["transformers"] == exports_as(config) == "Qwen2MoeForCausalLM"
    assert found[5]["lm_loss"] == 7.0


def test_training_time_goes_on_from_the_last_kept_record(config, folder):
    def seconds() -> list[float | None]:
        return [record["training_seconds"] for record in numbers(folder)]

    with Metrics(config, folder) as writer:
        writer.valid(Progress(10), 1.0)
        for iteration, milliseconds in ((20, 100.0), (40, 300.0), (60, 900.0)):
            writer.train(train_record(iteration=iteration, elapsed_time_per_iteration_ms=milliseconds))
        writer.valid(Progress(65), 1.0)
    assert seconds() == [None, 2.0, 8.0, 26.0, pytest.approx(30.5)]
    # From the checkpoint of iteration 50: 41 to 60 are counted once, at the new speed.
    with Metrics(config, folder, start_iteration=50) as writer:
        writer.train(train_record(iteration=60, elapsed_time_per_iteration_ms=50.0))
    assert seconds() == [None, 2.0, 8.0, 9.0]


def test_training_time_of_records_that_have_none_and_of_another_runs_checkpoint(config, folder):
    old = '{"kind": "train", "iteration": %d, "elapsed_time_per_iteration_ms": 500}\n'
    folder.metrics.write_text('{"kind": "event", "iteration": 0}\n' + old % 10 + old % 20)
    with Metrics(config, folder, start_iteration=20) as writer:
        writer.train(train_record(iteration=30, elapsed_time_per_iteration_ms=100.0))
    assert read_metrics(folder.metrics)[-1]["training_seconds"] == 11.0
    folder.metrics.unlink()
    # The launcher's, which does not know that training continues from elsewhere.
    records.append_event(folder.metrics, "preflight", 0, grade="ok")
    for start_iteration, seconds in ((1000, 1.0), (1010, 2.0)):
        with Metrics(config, folder, start_iteration) as writer:
            writer.train(train_record(iteration=start_iteration + 10, elapsed_time_per_iteration_ms=100.0))
        assert read_metrics(folder.metrics)[-1]["training_seconds"] == seconds


def test_a_resume_reads_no_more_than_the_end(config, folder, monkeypatch):
    with Metrics(config, folder) as writer:
        for iteration in range(1, 300):
            writer.train(train_record(iteration=iteration, elapsed_time_per_iteration_ms=100.0))
    before, parse, parsed = folder.metrics.read_bytes(), records.parsed_record, []
    monkeypatch.setattr(records, "parsed_record", lambda line: parsed.append(line) or parse(line))
    with Metrics(config, folder, start_iteration=295) as writer:
        writer.train(train_record(iteration=296, elapsed_time_per_iteration_ms=100.0))
    assert len(parsed) < 20
    lines, expected = folder.metrics.read_bytes().splitlines(), before.splitlines()
    assert lines[:296] == expected[:296]  # the event of the start, and 295 iterations
    assert [json.loads(line).get("training_seconds") for line in lines[296:]] == [None, pytest.approx(29.6)]


@pytest.mark.parametrize("read", [read_metrics, lambda path: list(iter_metrics(path))], ids=["all", "fast"])
def test_reading_is_tolerant(read, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    assert read(path) == []
    # A last line without its newline may be cut inside a number: 12 of 1234.
    path.write_bytes(b'{"iteration": 1}\nbroken\n\n{"iteration": 2}\n{"iteration": 12}')
    assert read(path) == [{"iteration": 1}, {"iteration": 2}]
    assert "line 2 is not a record" in caplog.text and caplog.text.count("is not a record") == 1
    path.write_bytes(b'{"iteration": 1}\n{"text": "\xc3')
    assert read(path) == [{"iteration": 1}]
    # NaN is not JSON, and text may be cut inside a character
    path.write_bytes(b'{"iteration": 1, "grad_norm": Infinity}\n{"text": "\xc3"}\n[1]\n')
    assert read(path) == [{"iteration": 1, "grad_norm": math.inf}, {"text": "\ufffd"}]
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


def test_log_of_rank_0(folder, config, clean_logging, capsys):
    console.setup_logging(folder, rank=0)
    console.setup_logging(folder, rank=0)
    logging.getLogger("moe_exp.train").info("hello")
    logging.getLogger("moe_exp.train").warning("careful")
    logging.getLogger("somebody.else").info("chatter")
    with Metrics(config, folder) as writer:
        writer.train(train_record())
    out, err = capsys.readouterr()
    hello, line, progress = out.splitlines()
    assert hello == "hello" and progress == progress_line(train_record())
    assert line[22:] == EXAMPLE[22:]
    place = f"{re.escape(socket.gethostname())} rank 0 {device_label()}"
    assert re.fullmatch(rf"\[[-\d]+ [:\d]+\] WARNING {place} moe_exp\.train: careful\n", err)
    logged = folder.log.read_text().splitlines()
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] hello", logged[0])
    assert logged[1:] == [err.strip(), line, progress]


def test_a_terminal_shows_short_lines_and_the_log_megatrons(folder, config, clean_logging, monkeypatch):
    terminal, stdout = pty.openpty()
    with os.fdopen(stdout, "w") as file, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", file)
        console.setup_logging(folder, rank=0)
        logging.getLogger("moe_exp.train").info("hello")
        with Metrics(config, folder) as writer:
            writer.train(train_record(timers={"optimizer": 1.5}))
            writer.valid(Progress(40), 2.0)
        shown = b""
        while shown.count(b"\n") < 4:
            shown += os.read(terminal, 10000)
    os.close(terminal)
    records = numbers(folder)
    train, valid = (terminal_line(record, config.train_iters) for record in records)
    assert shown.decode().splitlines() == ["hello", train, "ms per iteration: optimizer 1.5", valid]
    logged = folder.log.read_text()
    assert EXAMPLE[22:60] in logged and progress_line(train_record()) in logged
    assert "\n".join(validation_lines(records[1])) in logged and train not in logged


def test_log_of_another_rank(folder, tmp_path, clean_logging, capsys):
    console.setup_logging(folder, rank=3)
    logging.getLogger("moe_exp.train").info("hello")
    assert not folder.log.exists()
    logging.getLogger("moe_exp.train").error("lost")
    console.setup_logging(RunFolder(tmp_path / "unseen"), rank=3)
    logging.getLogger("moe_exp.train").error("here too")
    out, err = capsys.readouterr()
    assert out == "" and "here too" in err
    assert f"ERROR {socket.gethostname()} rank 3 {device_label()} moe_exp.train: lost\n" in err
    assert folder.log.read_text() == err.splitlines()[0] + "\n"
    assert not (tmp_path / "unseen").exists()
