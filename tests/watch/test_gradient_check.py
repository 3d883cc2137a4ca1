"""SDC_CHECK_EVERY: wrong values of one rank are found, and a run that has none does not change."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.legs import start_job, write_data
from helpers.checkpoint.small_job import (
    end_run,
    records,
    run_to_end,
    small_settings,
    start_run,
    write_tokens,
)
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint.format.folders import latest_iteration
from moe_exp.checkpoint.state import Progress, unwrapped
from moe_exp.config import load_config
from moe_exp.host.exit_codes import FAILED, FINISHED, START_AGAIN, TO_BE_CONTINUED
from moe_exp.training import loop
from moe_exp.training.interval import Interval
from moe_exp.training.replica_checks import GradientCheck, ReplicaError, suspects
from moe_exp.watch.excluded_nodes import read_excluded

REPEATED, BY_OTHERS = "that of the same computation, repeated", "that of the same computation on other ranks"
# Every kind of state that a forward pass changes, and every exchange that a check has to wait for.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"gpus_per_node": 1, "dropout": 0.1},
    "DP2, overlap": {"gpus_per_node": 2, "overlap": "true", "qk_clip": 5.0, "num_workers": 1},
    "DP2, whole optimizer": {"gpus_per_node": 2, "distributed_optimizer": False, "attention_dropout": 0.1},
    "EP2": {"gpus_per_node": 2, "ep": 2, "capacity_factor": 1.0},
    "DP4, EP2": {"gpus_per_node": 4, "ep": 2, "router_score": "sigmoid", "router_bias_update_rate": 1e-3},
}
SLOW_LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"gpus_per_node": 2, "tp": 2, "dropout": 0.1},
    "DP2, TP2": {"gpus_per_node": 4, "tp": 2, "dropout": 0.1},
    "workers and dropout": {"gpus_per_node": 2, "num_workers": 1, "dropout": 0.1},
    "dropout of documents": {
        "gpus_per_node": 2,
        "document_mask": True,
        "attention_dropout": 0.1,
        "log_timers": True,
    },
    "dense with EP": {"gpus_per_node": 4, "use_moe": False, "ep": 4},
    "DP2, TP2, EP2": {"gpus_per_node": 4, "tp": 2, "ep": 2},
    "DP2, PP2": {"gpus_per_node": 4, "pp": 2},
    "DP2, VPP2, overlap": {"gpus_per_node": 4, "pp": 2, "vpp": 2, "overlap": "true"},
    "DP2, CP2": {"gpus_per_node": 4, "cp": 2},
    "bf16, bf16 gradients": {"gpus_per_node": 4, "ep": 2, "dtype": "bf16", "grad_dtype": "bf16"},
    "dense": {"gpus_per_node": 2, "use_moe": False},
    "loss over all ranks": {"gpus_per_node": 4, "ep": 2, "aux_loss_type": "global_aux_loss"},
    "loss per sample": {"gpus_per_node": 4, "ep": 2, "aux_loss_type": "seq_aux_loss"},
    "layers for multi-token prediction": {"gpus_per_node": 2, "mtp_num_layers": 1},
    "recomputed": {"gpus_per_node": 2, "recompute": "full", "dropout": 0.1},
}
every = pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)]
)


def attention(job: Any) -> torch.nn.Module:
    named = (pair for chunk in job.trained.model for pair in unwrapped(chunk).named_modules())
    return next(module for name, module in named if name.endswith("self_attention"))


def flip(x: torch.Tensor, bit: int = 21) -> torch.Tensor:
    """`x` (fp32) with another bit in one value, in place; usually a bit of the mantissa."""
    x.detach().view(torch.int32).view(-1)[5] ^= 1 << bit
    return x


def spoil(job: Any, kind: str, is_on: Any) -> None:
    """Flips a bit in the forward or backward pass of the first attention, or once in a weight."""
    done: list[int] = []

    def hook(module: Any, given: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and is_on()) or (kind == "weight" and done):
            return
        done.append(1)
        if kind in ("activation", "exponent"):
            flip(output[0].data, 21 if kind == "activation" else 29)
        elif kind == "gradient":
            output[0].register_hook(lambda gradient: flip(gradient.clone()))
        else:
            flip(module.linear_proj.weight.data)

    attention(job).register_forward_hook(hook)


def curve_of(
    settings: dict[str, Any], port: int, fault: tuple[int, str, int, int] | None = None, bound: float = 0.0
) -> tuple[list[Any], str, list[int], int | None]:
    """On a rank: log records of five iterations, the error that ends them, the ranks that it names, and the
    last checked iteration. `fault`: rank, kind, and the first and last call that it spoils.
    """
    job, progress = start_job(settings, port), Progress()
    job = replace(job, eod_id=5 if job.config.document_mask else None)  # a frequent token
    interval = Interval(job.config, job.runtime, job.trained.model)
    check = None
    if job.config.sdc_check_every:
        check = GradientCheck(job.config, job.runtime, job.trained, progress)
        check._bound = bound
    if fault and fault[0] == job.runtime.rank:
        calls = iter(range(1, 10**6))
        spoil(job, fault[1], lambda: fault[2] <= next(calls) <= fault[3])
    found: list[Any] = []
    while progress.iteration < 5:
        try:
            step = loop.train_step(job, progress, interval, count_zeros=False, check=check)
        except ReplicaError as error:
            return found, str(error), list(error.hosts), progress.checked
        loop.settle(job, progress, interval, step)
        facts = {"learning_rate": 0.0, "grad_norm": step.grad_norm, "num_zeros": None, "loss_scale": 1.0}
        record = interval.record(progress, **facts)
        times = ("timers", "elapsed", "tokens_per_second", "tflops", "eta", "memory", "peak_memory")
        found.append({name: value for name, value in record.items() if not name.startswith(times)})
    return found, "", [], progress.checked


def on_ranks(folder: Path, settings: dict[str, Any], *more: Any) -> list[Any]:
    settings = {"train_data": str(write_data(folder))} | settings
    return run_on_ranks(settings["gpus_per_node"], curve_of, settings, free_port(), *more, join=False)


@every
def test_checks_change_nothing_and_find_nothing(layout, tmp_path):
    settings = (LAYOUTS | SLOW_LAYOUTS)[layout]
    expected = on_ranks(tmp_path, settings)
    found = on_ranks(tmp_path, settings | {"sdc_check_every": 2})
    assert [curve for curve, *_ in found] == [curve for curve, *_ in expected]
    assert {tuple(map(str, rest)) for _, *rest in found} == {("", "[]", "4")}


# The first iteration is checked, then every second one. With two micro-batches a rank passes each layer six
# times in a checked iteration: calls 7 and 8 are those for its neighbour in iteration 2, 9 and 10 those for
# itself, 11 and 12 those of training.
@pytest.mark.parametrize("kind", ["activation", pytest.param("gradient", marks=pytest.mark.slow)])
def test_a_fault_that_lasts_is_found_by_three_replicas(kind, tmp_path):
    first = on_ranks(tmp_path, {"gpus_per_node": 4, "gbsz": 16, "sdc_check_every": 2}, (2, kind, 7, 10**6))
    for curve, error, ranks, checked in first:
        assert (len(curve), ranks, checked) == (1, [2], 1)
        assert error.endswith(" rank 2 (" + os.uname().nodename + ")") and BY_OTHERS in error


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("gradient", 12),
        ("weight", 12),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("activation", 11), ("gradient", 9))),
    ],
)
def test_a_fault_that_does_not_repeat_is_of_its_rank(kind, call, tmp_path):
    found = on_ranks(tmp_path, {"gpus_per_node": 2, "sdc_check_every": 2}, (1, kind, call, call))
    assert {(len(curve), REPEATED in error, *ranks) for curve, error, ranks, _ in found} == {(1, True, 1)}


def test_two_replicas_are_named_together(tmp_path):
    settings = {"gpus_per_node": 2, "sdc_check_every": 2}
    for _, error, ranks, _ in on_ranks(tmp_path, settings, (1, "activation", 7, 10**6)):
        assert BY_OTHERS in error and ranks == [0, 1]


def test_a_weight_is_named_by_its_replicas(tmp_path):
    settings = {"gpus_per_node": 4, "gbsz": 16, "distributed_optimizer": False, "sdc_check_every": 4}
    for curve, error, ranks, _ in on_ranks(tmp_path, settings, (3, "weight", 8, 10**6)):
        assert (len(curve), ranks) == (3, [3])
        assert error.startswith("replicas: decoder.layers.0.self_attention.linear_proj.weight on rank 3 ")


def test_where_additions_have_no_fixed_order_norms_are_compared(tmp_path):
    """With a bound that is measured in the first iteration, instead of equal bits."""
    settings = {"gpus_per_node": 2, "sdc_check_every": 2}
    expected = on_ranks(tmp_path, settings)
    assert on_ranks(tmp_path, settings, None, math.nan) == expected
    for curve, error, ranks, _ in on_ranks(tmp_path, settings, (1, "exponent", 12, 12), math.nan):
        assert (len(curve), ranks) == (1, [1]) and REPEATED in error


def test_suspects():
    four, none = [0, 1, 2, 3], [0.0] * 4
    assert suspects(four, none, none, bound=0.0)[0] == []
    assert suspects(four, [0, 1e-9, 0, 0], [1.0] * 4, bound=0.0) == ([1], REPEATED)
    assert suspects(four, none, [0, 0, 1, 1], bound=0.0) == ([2], BY_OTHERS)  # batches of 2 and 3
    assert suspects(four, none, [1, 0, 0, 1], bound=0.0)[0] == [3]
    assert suspects(four, none, [0, 1, 0, 0], bound=0.0)[0] == [0, 1]  # only once
    assert suspects([0, 0, 1, 1], none, [0, 0, 1, 0], bound=0.0)[0] == [0, 1, 2, 3]
    assert suspects([0, 0, 1, 1, 2, 2], [0.0] * 6, [0, 1, 1, 0, 0, 0], bound=0.0)[0] == [0, 1]
    assert suspects(four, [0.01] * 4, [0.02] * 4, bound=0.05)[0] == []
    assert suspects(four, none, [0, math.inf, 0, 0], bound=0.05)[0] == [0, 1]


def spoil_run(kind: str, rank: int, first: int, last: int, slurm_job: str = "") -> None:
    """On a rank, before a run: spoils these iterations if it is `rank`; in a SLURM job, these calls."""
    train, calls = loop.train, iter(range(1, 10**6))
    os.environ |= {"SLURM_JOB_ID": slurm_job} if slurm_job else {}

    def spoilt(job: Any, progress: Progress, *rest: Any) -> Any:
        if job.runtime.rank == rank:
            at = (lambda: next(calls)) if slurm_job else lambda: progress.iteration + 1
            spoil(job, kind, lambda: first <= at() <= last)
        return train(job, progress, *rest)

    loop.train = spoilt


def run_spoilt(settings: dict[str, Any], *fault: Any) -> tuple[int, str]:
    """A whole run in which a rank computes wrong."""
    printed = Path(settings["run_dir"]) / f"{settings['run_name']}.printed"
    printed.write_text("")
    (code,) = set(end_run(start_run(settings, printed, before=(spoil_run, *fault)), printed))
    return code, printed.read_text()


def curve(folder: Path) -> list[Any]:
    return [(one["iteration"], one["lm_loss"], one["grad_norm"]) for one in records(folder, "train")]


def sdc_event(folder: Path) -> dict[str, Any]:
    """The only one of a run."""
    (event,) = (one for one in records(folder, "event") if one["event"] == "sdc")
    return event


def assert_ends_undisturbed(settings: dict[str, Any]) -> None:
    """Run to its end, the run has the curve of one that nobody disturbs or checks."""
    again = settings | {"run_name": "again", "sdc_check_every": 0}
    for one in (settings, again):
        assert run_to_end(one)[0] == FINISHED
    folder = Path(settings["run_dir"])
    assert curve(folder / settings["run_name"]) == curve(folder / "again")


CHECKED = {"sdc_check_every": 2, "save_interval": 2, "train_iters": 8, "gbsz": 8}


def test_a_run_goes_back_and_has_the_undisturbed_curve(tmp_path):
    """The fault begins after the check of iteration 4, and is found before the checkpoint of iteration 6."""
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "run", **CHECKED, gpus_per_node=4)
    code, printed = run_spoilt(settings, "gradient", 1, 5, 99)
    assert code == START_AGAIN
    assert "silent corruption after iteration 5: the gradient of embedding.word_embeddings.weight" in printed
    assert "SDC_CHECK_EVERY=2: 2 more forward and backward passes (" in printed and "100.0% of the" in printed
    event = sdc_event(tmp_path / "run")
    host = os.uname().nodename
    facts = event["iteration"], event["back_to"], event["set_aside"], event["ranks"], event["hosts"]
    assert facts == (5, 4, [], [1], [host])
    assert list(read_excluded(tmp_path / "exclude_nodes.txt")) == [host.partition(".")[0]]
    assert_ends_undisturbed(settings)


def test_a_checkpoint_of_a_stop_between_checks_is_set_aside(tmp_path):
    """The fault begins after the check of iteration 4, and the run stops after iteration 5."""
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "run", **CHECKED, gpus_per_node=2)
    run_spoilt(settings | {"exit_interval": 5}, "gradient", 1, 5, 99)
    assert latest_iteration(tmp_path / "run" / "checkpoints") == 5
    assert run_spoilt(settings, "gradient", 1, 5, 99)[0] == START_AGAIN
    event = sdc_event(tmp_path / "run")
    assert (event["back_to"], event["set_aside"], event["ranks"]) == (4, ["1/iter_0000005"], [0, 1])
    assert_ends_undisturbed(settings)


def test_without_a_checkpoint_it_begins_anew_and_not_forever(tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "run", **CHECKED, max_rollbacks=1)
    # under SLURM, only the next job has other nodes; the check takes calls 1 and 2, training 3 and 4
    code, printed = run_spoilt(settings, "gradient", 0, 3, 3, "7")
    assert code == TO_BE_CONTINUED and "the same command resumes from an earlier state" in printed
    code, printed = run_spoilt(settings, "gradient", 0, 3, 3, "7")
    assert code == FAILED
    assert "MAX_ROLLBACKS=1 reached. Fix: check the nodes with PREFLIGHT=1, then repeat" in printed
    assert run_to_end(settings)[0] == FINISHED
    assert len(curve(tmp_path / "run")) == 8


def test_settings():
    def problems(**settings: Any) -> list[str]:
        lines = load_config({"train_iters": 100, **settings}, {}).problems()
        return [line for line in lines if line.startswith(("SAVE_INTERVAL", "KEEP_LAST"))]

    assert problems(sdc_check_every=5, save_interval=20) == problems(sdc_check_every=5, save_interval=0) == []
    (line,) = problems(sdc_check_every=5, save_interval=22)
    assert line.startswith("SAVE_INTERVAL=22: must be a multiple of SDC_CHECK_EVERY=5, so that checkpoints")
    (line,) = problems(sdc_check_every=5, save_interval=20, keep_last=1)
    assert line.startswith("KEEP_LAST=1: keeps only the last save, but SDC_CHECK_EVERY may need an earlier")
