"""summary.json and the lines for people, on a run of four iterations written out by hand."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from moe_exp.config import Config
from moe_exp.runs.records import iter_metrics
from moe_exp.runs.run_folder import RunFolder
from moe_exp.runs.summary import Caller, Status, split_experts, summarize, summary_text

WORST = {"layer": 2, "tokens_per_expert": [8, 0], "max_over_mean": 2.0, "dropped_fraction": 0.05}
EXPERTS = [
    {"layer": 1, "tokens_per_expert": [5, 3], "max_over_mean": 1.25, "dropped_fraction": 0.0},
    WORST | {"microbatch_max_over_mean": 2.5},
]


def train(iteration: int, lm_loss: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "train", "iteration": iteration, "consumed_samples": 8 * iteration,
        "consumed_tokens": 1000 * iteration, "lm_loss": lm_loss, "elapsed_time_per_iteration_ms": 100.0,
        "tokens_per_second": 10000.0, "tflops_per_gpu": None, "skipped_iterations": 0, "nan_iterations": 0,
        "experts": EXPERTS,
    } | changes  # fmt: skip


RECORDS = [
    {"kind": "event", "event": "start", "iteration": 0},
    # The first record holds the warm-up: medians have to pass it by.
    train(1, 8.0, elapsed_time_per_iteration_ms=9000.0, tokens_per_second=111.0),
    train(2, 5.0, experts=[{"layer": 2, "tokens_per_expert": [0, 8]}]),
    {"kind": "event", "event": "resume", "iteration": 2, "transformers": "OlmoeForCausalLM"},
    train(3, 4.0, skipped_iterations=1),
    train(4, 4.5),
    {"kind": "valid", "iteration": 2, "lm_loss": 5.5, "lm_loss_ppl": 244.7},
    {"kind": "valid", "iteration": 4, "lm_loss": 4.25, "lm_loss_ppl": 70.1},
]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    for name in ("iter_0000002", "iter_0000004", "not_a_checkpoint"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    return RunFolder(tmp_path)


def config(**settings: Any) -> Config:
    return Config(**({"gpus_per_node": 1, "train_iters": 4, "warmup_iters": 0} | settings))


def told(folder: RunFolder, config: Config, status: Status = "finished", *, records=RECORDS, **more) -> str:
    """The printed summary of a run; `more`: code, caller."""
    caller = more.pop("caller", None)
    summary = summarize(config, *split_experts(records), folder, 12.3, status, **more)
    return summary_text(summary, config, caller)


def test_summary(folder: RunFolder) -> None:
    summary = summarize(config(), *split_experts(RECORDS), folder, 12.3456, "finished")
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary == {
        "status": "finished", "exit_code": 0, "ended_by": None, "logged_iteration": 4, "name": config().name,
        "run_folder": str(folder.path), "model": "dmoe", "iteration": 4, "train_iters": 4,
        "first_lm_loss": 8.0, "last_lm_loss": 4.5, "min_lm_loss": 4.0, "min_lm_loss_iteration": 3,
        "last_valid_lm_loss": 4.25, "last_valid_ppl": 70.1, "last_valid_ema_lm_loss": None,
        "consumed_samples": 32, "consumed_tokens": 4000, "wall_seconds": 12.346,
        "tokens_per_second": 10000.0, "ms_per_iteration": 100.0, "tflops_per_gpu": None,
        "skipped_iterations": 1, "nan_iterations": 0, "num_starts": 2, "transformers": "OlmoeForCausalLM",
        "checkpoints": ["iter_0000002", "iter_0000004"],
        "expert_balance": {
            "worst_layer": 2, "max_over_mean": 2.0, "microbatch_max_over_mean": 2.5, "dropped_fraction": 0.05,
            "run_max_vio": 0.5,  # 24 and 8 slots of layer 2
            "num_experts": 4, "dead_experts": [[2, 1]],
        },
    }  # fmt: skip


def test_text(folder: RunFolder) -> None:
    text = told(folder, config())
    for fact in (
        "Run finished: 4 of 4 iterations", "8.0000 -> 4.5000 (lowest 4.0000 at iteration 3)",
        "4.2500 (perplexity 70.10)", "4,000 (10,000 tokens/s, 100.0 ms per iteration)",
        "2.00 times its fair share (layer 2, 2.50 in a micro-batch), 1 of 4 got no token",
        "MaxVio over the run 0.50, up to 5.0% of slots dropped",
        "0 iterations with non-finite loss, 1 skipped", "2, newest: checkpoints/iter_0000004",
        f"moe-exp report {folder.path}   #",
        f"moe-exp generate --checkpoint {folder.path} --prompt ", f"moe-exp convert to-hf {folder.path} ",
        "moe-exp train --use-moe false   #", "moe-exp train --ep 2 --gpus-per-node 2   #",
    ):  # fmt: skip
        assert fact in text


def test_the_loss_of_averaged_weights_is_in_the_text(folder: RunFolder) -> None:
    records = [r | {"ema_lm_loss": 4.125} if r["kind"] == "valid" else r for r in RECORDS]
    summary = summarize(config(), *split_experts(records), folder, 12.3, "finished")
    assert summary["last_valid_ema_lm_loss"] == 4.125
    assert "(perplexity 70.10), averaged weights 4.1250\n" in summary_text(summary, config())


def test_what_to_try_next_repeats_the_command_of_the_user(folder: RunFolder) -> None:
    given = config(train_iters=60, use_moe=True, run_name="mine", train_data="my data", split="99,1")
    environ = {"RUN_NAME": "mine", "USE_MOE": "true", "TRAIN_DATA": "my data"}
    caller = Caller(".venv/bin/moe-exp", "bash run.sh --train-iters 60", environ)
    text = told(folder, given, caller=caller)
    assert f"  .venv/bin/moe-exp report {folder.path}   #" in text
    same = "TRAIN_DATA='my data' bash run.sh --train-iters 60"
    assert f"  RUN_NAME=mine_dense USE_MOE=false {same}   # the dense" in text
    assert f"  RUN_NAME=mine_ep2 USE_MOE=true {same} --ep 2 --gpus-per-node 2   # experts" in text
    assert "generate" not in text  # nobody knows the tokenizer
    assert caller.command_with(train_iters=9).endswith("--train-iters 60 --train-iters 9")  # the last counts
    caller = Caller(command="moe-exp train --resume runs/mine --lr 1")
    other = "moe-exp train --config runs/mine --lr 1 --run-name mine_ep2 --ep 2"
    assert caller.command_with(run_name="mine_ep2", ep=2) == other
    assert caller.command_with(train_iters=9) == "moe-exp train --resume runs/mine --lr 1 --train-iters 9"


def test_no_command_is_suggested_that_would_be_refused(folder: RunFolder) -> None:
    upcycled = config(upcycle_from="runs/other/checkpoints", router_score="relu")
    text = told(folder, upcycled, records=[record | {"transformers": None} for record in RECORDS])
    assert "dense" not in text.partition("next")[2] and "to-hf" not in text
    assert "--ep" not in told(folder, config(nnodes=2, gpus_per_node=8))
    assert "train --ep 2   #" in told(folder, config(gpus_per_node=2))
    for settings in ({"num_experts": 7}, {"ep": 2, "gpus_per_node": 2}):
        assert "--ep 2" not in told(folder, config(**settings))


def test_a_run_without_records(tmp_path: Path) -> None:
    summary = summarize(config(), *split_experts([]), RunFolder(tmp_path), 0.5, "failed")
    values = [summary[key] for key in ("iteration", "first_lm_loss", "expert_balance", "checkpoints")]
    assert values == [0, None, None, []]
    text = summary_text(summary, config())
    assert text.startswith("Run failed: 0 of 4 iterations in 0:00:00\n  lm loss      never measured\n")
    assert text.endswith("  the same command starts at iteration 0 (no checkpoint)")


def test_a_run_that_bad_steps_have_ended_is_not_sent_the_same_way_again(folder: RunFolder) -> None:
    records = [RECORDS[0], {"kind": "event", "event": "too_many_bad_steps", "iteration": 5}]
    bad = config(train_iters=9, lr=1e30)
    text = told(folder, bad, "failed", records=records, code=1)
    assert text.startswith("Run failed: 5 of 9 iterations")
    assert "  tokens       0 up to iteration 0, the last logged iteration\n" in text
    assert "set LR below 1e+30, with another RUN_NAME" in text
    assert "iter_0000004, which helps if a bad batch was the cause" in text
    assert "LR=1e" not in text and "--ep 2" not in text


def test_a_stop_that_has_saved_nothing_says_why_its_code_is_1(folder: RunFolder) -> None:
    text = told(folder, config(train_iters=9), "stopped", code=1)
    fix, why = "set SAVE_AT_END=true, or SAVE_INTERVAL below 1000", "exit code 1: SAVE_AT_END=false"
    assert f"  {fix}   # {why}, " in text
    assert "--use-moe" not in text


RESTARTS = "(no checkpoint); MAX_RESTARTS=3 restarts the ranks automatically\n"


def test_after_a_hang_there_is_a_look_at_the_stacks(tmp_path: Path) -> None:
    records = [*RECORDS, {"kind": "event", "event": "hang", "iteration": 4, "folder": "hang/NOW"}]
    text = told(RunFolder(tmp_path), config(train_iters=9), "failed", records=records, code=1)
    assert f"  {tmp_path}/hang/NOW/summary.txt   #" in text and RESTARTS in text


@pytest.mark.parametrize(("max_restarts", "hint"), [(0, True), (2, False)])
def test_after_a_killed_rank_there_is_a_hint_of_restarts(max_restarts, hint, tmp_path: Path) -> None:
    killed = {"kind": "event", "event": "rank_failed", "iteration": 4, "rank": 1, "cause": "SIGKILL"}
    of_run = config(train_iters=9, max_restarts=max_restarts)
    summary = summarize(of_run, *split_experts([*RECORDS, killed]), RunFolder(tmp_path), 1.0, "failed", 1)
    assert summary["ended_by"] == killed
    assert (RESTARTS in summary_text(summary, of_run)) == hint


def test_a_stopped_run_says_from_where_it_goes_on(folder: RunFolder) -> None:
    text = told(folder, config(train_iters=9), "stopped")
    assert "Run stopped: 4 of 9 iterations" in text
    assert "the same command resumes from iter_0000004\n" in text


def test_a_loss_that_became_nan_is_not_hidden(folder: RunFolder) -> None:
    records = [*RECORDS, train(5, None, nan_iterations=1)]
    text = told(folder, config(), records=records)
    assert "8.0000 -> not a number (lowest 4.0000 at iteration 3)" in text
    assert "LR=0.00015 with another RUN_NAME" in text


def test_the_experts_of_a_long_run_are_not_kept_in_memory(folder: RunFolder) -> None:
    layer: dict[str, Any] = {"layer": 1, "max_over_mean": 1.0, "dropped_fraction": 0.0}
    layer["tokens_per_expert"] = [10**6 + expert for expert in range(512)]
    line = json.dumps(train(1, 4.0, experts=[layer] * 8)).encode() + b"\n"
    folder.metrics.write_bytes(line * 500)
    tracemalloc.start()
    records, balance = split_experts(iter_metrics(folder.metrics))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(records) == 500 and peak < len(line) * 500 / 10
    assert balance is not None and balance["run_max_vio"] == pytest.approx(
        (10**6 + 511) / (10**6 + 255.5) - 1
    )


def test_a_dense_run_is_sent_to_experts_and_a_given_name_is_not_used_twice(folder: RunFolder) -> None:
    dense = config(use_moe=False, run_name="a")
    text = told(folder, dense, records=[train(1, 8.0, experts=[])])
    assert "moe-exp train --use-moe true --run-name a_moe" in text
    assert "--ep 2" not in text and "experts   " not in text
