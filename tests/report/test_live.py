"""Runs watched in the terminal: how a file is followed, and what the picture says."""

import io
import json
import os
import random
import re
import signal
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moe_exp.report.follower import Follower, layers_by_load
from moe_exp.report.live import buckets, plot, sparkline, watch
from moe_exp.report.run_data import read_run
from moe_exp.runs.records import drop_records_after

START = {"kind": "event", "event": "start", "iteration": 0, "time": "2026-01-01T10:00:00+00:00"}
END = START | {"event": "end", "iteration": 40, "time": "2026-01-01T10:09:00+00:00", "status": "finished"}
LAYER = {"layer": 1, "tokens_per_expert": [60, 68], "max_over_mean": 1.0625, "dropped_fraction": 0.0}
WORST = {"layer": 3, "tokens_per_expert": [128, 0], "max_over_mean": 2.0, "dropped_fraction": 0.125}
EXPERTS = [LAYER | {"router_entropy": 0.69}, WORST | {"router_entropy": 0.5}]


def train(iteration: int, lm_loss: float | None = 4.0, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "train", "iteration": iteration, "lm_loss": lm_loss, "learning_rate": 2.5e-4,
        "grad_norm": 1.75, "eta_seconds": 3725.0, "elapsed_time_per_iteration_ms": 500.0,
        "tokens_per_second": 12345.6, "tflops_per_gpu": 82.4, "peak_memory_bytes": 2_500_000_000,
        "skipped_iterations": 0, "nan_iterations": 0, "experts": EXPERTS,
    } | changes  # fmt: skip


def valid(iteration: int, lm_loss: float) -> dict[str, Any]:
    return {"kind": "valid", "iteration": iteration, "lm_loss": lm_loss, "lm_loss_ppl": 33.25}


def text_of(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def make_run(folder: Path, *records: Any, use_moe: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"train_iters: 40\nuse_moe: {str(use_moe).lower()}\nmoe_type: dmoe\n")
    (folder / "metrics.jsonl").write_text(text_of(*records))
    return folder


def append(run: Path, *records: Any) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text_of(*records))


def set_age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def picture(*paths: Path, width: int = 100, **options: Any) -> str:
    file = io.StringIO()
    watch(list(paths), console=Console(file=file, width=width, height=50, color_system=None), **options)
    assert all(len(line) <= width for line in file.getvalue().splitlines())
    return file.getvalue()


def fresh(path: Path) -> Follower:
    follower = Follower(path)
    follower.refresh()
    return follower


def test_picture_of_one_run(tmp_path: Path) -> None:
    records = [START, *(train(iteration, 8.0 - iteration / 10) for iteration in range(1, 21)), valid(20, 3.5)]
    text = picture(make_run(tmp_path / "a run", *records))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "a run dmoe running"
    assert re.fullmatch("the last record is .* old .usual interval 0.5 s.", lines[1])
    assert re.fullmatch("iteration 20/40 .* eta 1:02:0[345]", lines[2])
    expected = [
        "loss from iteration 1 to 20", "loss 6.0000", "validation 3.5000 (perplexity 33.25) at iteration 20",
        "learning rate 2.500e-04", "grad norm 1.75",
        "throughput 12,346 tokens/s, 500.0 ms per iteration, 82.4 TFLOP/s per rank", "memory 2.5 GB",
        "3 2.00 1 of 2 12.5% 0.500", "1 1.06 0 of 2 0.0% 0.690", "10:00:00 start iteration 0",
    ]  # fmt: skip
    assert [line for line in lines if line in expected] == expected
    plotted = [line for line in text.splitlines() if re.search("[\u2801-\u28ff]", line)]
    assert len(plotted) == 8 and plotted[0].startswith("     7.9 ⠱") and plotted[-1].startswith("       6 ")
    append(tmp_path / "a run", START, START)
    file = io.StringIO()
    watch([tmp_path / "a run"], console=Console(file=file, width=80, height=24))
    assert len(file.getvalue().splitlines()) <= 23  # it fits the terminal


def test_a_checkpoint_saved_in_the_background_does_not_take_the_run_back(tmp_path: Path) -> None:
    late, resume = (START | {"event": name, "iteration": 100} for name in ("checkpoint", "resume"))
    run = make_run(tmp_path / "a", START, train(100), train(110), late)
    assert fresh(run).watched.iteration == 110
    append(run, resume)
    assert fresh(run).watched.iteration == 100


def test_dense_run_with_gaps(tmp_path: Path) -> None:
    records = [train(1 + index, loss, experts=[]) for index, loss in enumerate((5.0, None, None, 5.0))]
    text = picture(make_run(tmp_path / "a", START, *records, use_moe=False))
    parts = ("a  dense  running", "4, 2 not a number", "2 records without a finite loss")
    assert all(part in text for part in parts) and "MoE layers" not in text
    text = picture(make_run(tmp_path / "b", START, train(1, None), use_moe=False))
    assert "loss           not a number" in text


def test_a_run_without_records_or_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (run / "config.yaml").unlink()
    assert "no train record yet" in picture(run)
    # Of an older version, or of another program: whatever is missing is not shown.
    bare = {"kind": "train", "iteration": 1}
    append(run, bare, bare | {"experts": 7})
    assert "not a number" in picture(run)
    append(run, bare | {"eta_seconds": 1e99, "experts": [{"layer": "x", "tokens_per_expert": 1}, None]})
    assert "eta -" in picture(tmp_path / "a") and "0 of 0" in picture(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.yaml").write_text("train_iters: [")
    assert "waiting for" in picture(tmp_path / "b")


def test_several_runs_are_rows_of_as_many_columns_as_there_is_room_for(tmp_path: Path) -> None:
    long = "moe_true_num_experts_64_topk_1_type_dmoe_num_nodes_1_gpus_per_node_8_TP_1"
    runs = [make_run(tmp_path / "dense", START, train(40, 3.25, experts=[]), END, use_moe=False)]
    runs += [make_run(tmp_path / long, START, train(10), valid(10, 4.5))]
    wide = [" ".join(line.split()) for line in picture(*runs, runs[0], width=240).splitlines()]
    head = "run state iteration loss eta tokens/s worst layer valid curve grad norm learning rate memory last"
    assert any(line.startswith(head) for line in wide)
    (dense,) = (line for line in wide if "dense" in line)  # given twice
    assert dense.startswith("dense finished 40/40 3.2500 - 12,346 - - ▅ 1.75 2.500e-04 2.5 GB ")
    (moe,) = (line for line in wide if "running 10/40 4.0000 1:02:0" in line)
    assert "3: 2.00x, 1 dead, 12.5% dropped 4.5000" in moe
    narrow = picture(*runs, width=60)
    assert "worst layer" not in narrow and "3.2500" in narrow
    names = "".join(line.split()[0] for line in narrow.splitlines() if line.strip())
    assert names.count("moe_true_num_ex") == 1


def test_names_are_told_apart_and_are_text(tmp_path: Path) -> None:
    text = picture(*(make_run(tmp_path / place / "run", START) for place in ("monday", "tuesday")))
    assert "monday/run" in text and "tuesday/run" in text
    name = "<script>[red]\x1b[31mx\n"
    text = picture(make_run(tmp_path / name, START | {"event": "[bold]\x1b[2J"}, train(1)))
    assert "<script>[red]?[31mx?" in text and "[bold]?[2J" in text and "\x1b" not in text


def test_a_console_without_unicode(tmp_path: Path) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    run = make_run(tmp_path / "a", START, *(train(iteration, 1.0 + iteration) for iteration in range(8)))
    watch([run], console=Console(file=file, width=80), once=True)
    watch([run, make_run(tmp_path / "b", START)], console=Console(file=file, width=200), once=True)
    file.flush()
    assert b"_.-=+*%#" in raw.getvalue()


def test_following_a_file_sees_what_reading_it_whole_does(tmp_path: Path) -> None:
    """Lines that come in pieces, garbage, and resumes that write the file anew, longer or shorter."""
    path = tmp_path / "metrics.jsonl"
    follower, choose = Follower(tmp_path), random.Random(3)
    iteration, half = 0, ""
    for _ in range(300):
        step = choose.random()
        if step < 0.1:
            iteration = max(0, iteration - choose.randrange(9))
            drop_records_after(path, iteration)
            half = text_of(START | {"event": "resume", "iteration": iteration, "time": str(choose.random())})
        elif step < 0.15:
            half += "garbage\n"
        else:
            iteration += 1
            more = [valid(iteration, choose.random())] * choose.randrange(2)
            half += text_of(train(iteration, choose.random()), *more)
        cut = choose.randrange(len(half) + 1)
        with path.open("a") as file:
            file.write(half[:cut])
        half = half[cut:]
        if choose.random() < 0.7:
            follower.refresh()
            assert follower.watched == fresh(path).watched
    assert iteration > 50 and follower.watched.num_train > 50


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", START, *(train(iteration) for iteration in range(1, 50)))
    follower, taken = fresh(run), []
    follower._also = taken.append
    with (run / "metrics.jsonl").open("r+") as file:
        file.write("x" * 1000)  # a second reading would stumble over it
    append(run, train(50, 2.0))
    follower.refresh()
    assert [record["iteration"] for record in taken] == [50]
    assert follower.watched.num_train == 50 and follower.watched.num_unreadable_lines == 0


def test_other_records_of_the_same_length_are_noticed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", START, *(train(iteration, 4.0) for iteration in range(10, 20)))
    follower = fresh(run)
    others = text_of(START, *(train(iteration, 5.0) for iteration in range(10, 30)))
    (run / "metrics.jsonl").write_text(others)
    follower.refresh()
    assert {loss for _, loss in follower.watched.losses} == {5.0} and follower.watched.num_train == 20


def test_a_file_that_comes_and_goes(tmp_path: Path) -> None:
    follower = fresh(tmp_path / "a")
    assert follower.modified is None and follower.status() is None
    make_run(tmp_path / "a", START, train(1))
    follower.refresh()
    assert follower.modified is not None and follower.watched.iteration == 1
    (tmp_path / "a" / "metrics.jsonl").unlink()
    follower.refresh()
    assert follower.modified is None and follower.watched.num_train == 0
    (tmp_path / "a" / "metrics.jsonl").mkdir()
    follower.refresh()
    assert follower.trouble == "Is a directory"


def test_lines_that_are_no_records_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", START, train(1), [1], {"kind": "train", "iteration": "2"}, 7)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"kind": "train", "iteration": 3, "lm_loss": NaN}\n\n{"kind": "tra')
    watched = fresh(run).watched
    assert (watched.num_unreadable_lines, watched.num_train) == (4, 2)
    assert (watched.iteration, watched.num_not_finite) == (3, 1)
    assert "4 invalid lines in metrics.jsonl" in picture(run)


def test_usual_interval_is_that_between_records(tmp_path: Path) -> None:
    slow = train(30, elapsed_time_per_iteration_ms=90_000.0)
    run = make_run(tmp_path / "a", START, train(10), valid(10, 4.0), train(20), slow)
    assert fresh(run).watched.usual_interval_seconds == 5.0
    resumed = START | {"event": "resume", "iteration": 100}
    assert fresh(make_run(tmp_path / "b", resumed, train(110))).watched.usual_interval_seconds == 5.0


@pytest.mark.parametrize(("ms", "age", "is_late"), [(500, 9, 0), (500, 11, 1), (5000, 49, 0), (5000, 52, 1)])
def test_late(tmp_path: Path, ms: float, age: float, is_late: bool) -> None:
    run = make_run(tmp_path / "a", START, train(1, elapsed_time_per_iteration_ms=ms))
    set_age(run / "metrics.jsonl", age)
    text = picture(run)
    assert ("no record for" in text, "a  dmoe  late" in text) == (is_late, is_late)
    assert ("a: no record for" in picture(run, make_run(tmp_path / "b", START))) == is_late
    append(run, END)
    set_age(run / "metrics.jsonl", age)
    assert "the run has ended" in picture(run)


def test_status(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", START, train(1))
    assert (fresh(run).status(), read_run(run).status) == (None, "running")
    # Killed: the launcher writes the summary after the last record.
    (run / "summary.json").write_text('{"status": "failed"}')
    assert fresh(run).status() == read_run(run).status == "failed"
    # Resumed: the summary is older than the records now.
    set_age(run / "summary.json", 100)
    append(run, START | {"event": "resume", "iteration": 1}, train(2))
    assert fresh(run).status() is None
    append(run, END | {"status": "stopped"})
    assert fresh(run).status() == "stopped"
    # Started once more, and not yet as far as its first record.
    later = (datetime.fromisoformat(START["time"]) + timedelta(minutes=20)).isoformat()
    (run / "provenance.json").write_text(json.dumps({"starts": [{"time": START["time"]}, {"time": later}]}))
    assert fresh(run).status() is None


def test_watching_ends_with_the_last_run(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", START, train(1)), tmp_path / "b"]
    file = io.StringIO()
    console = Console(file=file, width=100, height=50, force_terminal=True, _environ={"TERM": "xterm"})
    options = {"console": console, "seconds": 0.01}
    thread = threading.Thread(target=watch, args=(runs,), kwargs=options, daemon=True)
    thread.start()
    append(runs[0], END)
    make_run(runs[1], START, train(1))
    thread.join(0.2)
    assert thread.is_alive()
    append(runs[1], END | {"status": "failed"})
    thread.join(60)
    assert not thread.is_alive()
    last = file.getvalue().rpartition("\x1b[2K")[2]
    assert "failed" in file.getvalue() and "\x1b[?25h" in last  # the cursor is back


def test_ctrl_c_ends_at_once_and_leaves_a_cursor(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, height=50, force_terminal=True, _environ={"TERM": "xterm"})
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        watch([tmp_path / "a"], console=console, seconds=60)
    assert "waiting for" in file.getvalue() and "\x1b[?25h" in file.getvalue().rpartition("\x1b[2K")[2]


def test_bad_input_is_told_together(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "b", START)
    with pytest.raises(ValueError) as error:
        picture(tmp_path / "runs", tmp_path / "none")
    runs, none = str(error.value).splitlines()
    assert runs.startswith(f"RUN={tmp_path}/runs: is not a run folder") and "run folders in it: b" in runs
    assert none.startswith(f"RUN={tmp_path}/none: folder not found")
    assert "running" in picture(tmp_path / "runs" / "b" / "metrics.jsonl")


def test_dead_experts_and_the_worst_layer() -> None:
    cases = {(100, 100, 0, 0): 2, (9950, 0.5 * 99, 1, 100): 1, (0, 0): 0, (): 0}  # 1% of 2525.1 is 25.3
    for tokens, num_dead in cases.items():
        (layer,) = layers_by_load({"experts": [{"tokens_per_expert": list(tokens)}]})
        assert layer.num_dead == num_dead
    found = [(layer.layer, layer.num_dead, layer.num_experts) for layer in layers_by_load(train(1))]
    assert found == [(3, 1, 2), (1, 0, 2)]
    assert layers_by_load({"experts": None}) == [] and layers_by_load({}) == []
    assert layers_by_load({"experts": [{"layer": 2, "max_over_mean": None}]})[0].max_over_mean is None


def test_curves_in_characters() -> None:
    assert buckets([1.0, 3.0, None, 5.0, None, None], 3) == [2.0, 5.0, None]
    assert buckets([1.0, 2.0], 9) == [1.0, 2.0] and buckets([], 3) == []
    assert sparkline([0.0, 7.0, None, 3.5, 1.0], 9) == "▁█ ▅▂"
    assert sparkline([0.0, 7.0], 9, ascii_only=True) == "_#"
    assert sparkline([2.0, 2.0], 9) == "▅▅" and sparkline([None], 9) == " " and sparkline([], 9) == ""
    # From the upper left dot down to the lower right one; the second column draws all of the way.
    assert plot([1.0, 0.0], 1, 1) == [chr(0x2800 + 0x01 + 0x10 + 0x20 + 0x80)]
    assert plot([None, None], 1, 2) == ["\u2800", "\u2800"]
