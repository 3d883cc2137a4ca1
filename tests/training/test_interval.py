"""Train records of whole models on layouts of ranks: every slot counted once, and the numbers of one rank."""

import math
import os
import statistics
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.model_on_ranks import RandomTokens
from helpers.ranks import run_jobs, run_on_ranks
from helpers.whole_runs import SMALL
from moe_exp.checkpoint.state import Progress, Trained
from moe_exp.config import load_config
from moe_exp.engine import runtime
from moe_exp.engine.model import build_model
from moe_exp.engine.optimizer_setup import LearningRateScheduler, build_optimizer
from moe_exp.layers.experts import RoutedTokens
from moe_exp.training import loop
from moe_exp.training.interval import Interval, expert_record
from moe_exp.training.step import IterationEnd, end_iteration

ITERATIONS = 2
SETTINGS = {
    **SMALL, "num_layers": 4, "first_k_dense": 1, "hidden_size": 32, "ffn_hidden_size": 48,
    "moe_ffn_hidden_size": 20, "num_heads": 4, "num_query_groups": 2, "seq_len": 16, "vocab_size": 200,
    "num_experts": 8, "topk": 2, "mbsz": 2, "lr": 1e-3, "warmup_iters": 0, "init_std": 0.3,
    "aux_loss_type": "aux_loss,seq_aux_loss", "aux_loss_coeff": "0.01,0.02", "z_loss_coeff": 0.001,
    "log_interval": ITERATIONS,
}  # fmt: skip
KINDS = {
    "dropless": {"moe_type": "dmoe"},
    "capacity": {"moe_type": "moe", "capacity_factor": 0.75, "pad_to_capacity": False},
}
# (EP, TP, PP, replicas of the experts): the settings and the number of ranks.
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "(1,1,1,1)": (1, {}),
    "(2,1,1,1)": (2, {"ep": 2}),
    "(1,2,1,2)": (4, {"tp": 2}),
    "(2,1,2,1)": (4, {"ep": 2, "pp": 2}),
    "CP=2": (2, {"cp": 2}),
}
# With the number of micro-batches of a rank.
CASES = [(layout, kind, 2) for layout in LAYOUTS for kind in KINDS] + [("(2,1,1,1)", "dropless", 1)]
OF_CASE = pytest.mark.parametrize(
    ("layout", "kind", "accumulation"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (LAYOUTS[case[0]][0] == 4)) for case in CASES],
)
PER_LAYER = (
    "max_over_mean", "max_vio", "dead_fraction", "dropped_fraction", "router_entropy", "top1_weight",
    "load_balancing_loss", "z_loss",
)  # fmt: skip


def job_settings(layout: str, kind: str, accumulation: int) -> dict[str, Any]:
    ranks, sizes = LAYOUTS[layout]
    data_parallel = ranks // (sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1))
    return SETTINGS | KINDS[kind] | sizes | {"gbsz": SETTINGS["mbsz"] * data_parallel * accumulation}


def record_on_rank(settings: dict[str, Any], port: int) -> tuple[dict[str, Any], int]:
    """On one rank: the train record of the first interval, and the rows that this rank's experts computed."""
    os.environ["MASTER_PORT"] = str(port)
    config = load_config(settings | {"gpus_per_node": int(os.environ["WORLD_SIZE"])}, {})
    rank = runtime.start(config)
    model = build_model(config, rank)
    optimizer = build_optimizer(config, model)
    trained = Trained(model, optimizer, LearningRateScheduler(config, optimizer))
    loop.optimizer_setup.set_megatron_hooks(model, trained.optimizer)
    stream = RandomTokens(config.seq_len, config.vocab_size)
    job: Any = SimpleNamespace(
        config=config, runtime=rank, trained=trained, train_stream=stream, eod_id=None, graphs=None
    )
    interval, progress = Interval(config, rank, model), Progress()
    rows, counts = _count_rows(interval), _counts_of_microbatches(interval)
    for _ in range(ITERATIONS):
        loop.train_step(job, progress, interval, count_zeros=False)
    record = interval.record(progress, learning_rate=0.0, grad_norm=None, num_zeros=None, loss_scale=1.0)
    if rank.world_size == 1:
        for layer in record["experts"]:
            each = counts[layer["layer"]]
            assert len(each) == ITERATIONS * config.num_microbatches
            expected = statistics.fmean(max(slots) * len(slots) / sum(slots) for slots in each)
            assert layer["microbatch_max_over_mean"] == pytest.approx(expected, rel=1e-12)
            size = config.num_microbatches
            batches = [each[start : start + size] for start in range(0, len(each), size)]
            loads = [[sum(slots) for slots in zip(*batch, strict=True)] for batch in batches]
            vios = [max(load) * len(load) / sum(load) - 1 for load in loads]
            assert layer["max_vio"] == pytest.approx(statistics.fmean(vios), rel=1e-12)
    for layer in interval.layers.values():  # the next starts at zero
        assert not layer.statistics.tokens_per_expert_E.any() and not layer.statistics.sums.any()
    runtime.stop()
    return record, sum(rows)


def _count_rows(interval: Any) -> list[int]:
    """Fills with the rows of every call of the experts of this rank, whatever the layer gives them."""
    rows: list[int] = []

    def count(_: Any, inputs: tuple[Any, ...]) -> None:
        (given,) = inputs
        if isinstance(given, RoutedTokens):
            kept_TK, padded = given.decision.kept_TK, given.rows_per_expert
            slots = given.decision.expert_TK.numel() if kept_TK is None else int(kept_TK.sum())
            rows.append(slots if padded is None else padded * len(layer.experts.weight1))
        else:
            rows.append(given.rows_RD.size(0))

    for layer in interval.layers.values():
        layer.experts.register_forward_pre_hook(count)
    return rows


def _counts_of_microbatches(interval: Any) -> dict[int, list[list[int]]]:
    """Fills, by layer, with the slots per expert of every micro-batch."""
    counts: dict[int, list[list[int]]] = {}

    def counted(into: list[list[int]], add: Any, decision: Any, *others: Any, **named: Any) -> None:
        into.append(decision.tokens_per_expert_E.tolist())
        add(decision, *others, **named)

    for index, module in interval.layers.items():
        into = counts.setdefault(index + 1, [])
        module.statistics.add = partial(counted, into, module.statistics.add)
    return counts


@cache
def found(num_ranks: int) -> dict[tuple[str, str, int], tuple[dict[str, Any], int]]:
    """Records of all jobs of as many ranks, and the rows of all ranks."""
    keys = [case for case in CASES if LAYOUTS[case[0]][0] == num_ranks]
    found = run_jobs(num_ranks, record_on_rank, [(job_settings(*key),) for key in keys])
    pairs = zip(keys, found, strict=True)
    return {key: (ranks[0][0], sum(rows for _, rows in ranks)) for key, ranks in pairs}


@cache
def on_one_rank(kind: str) -> dict[int, dict[str, Any]]:
    """By global batch: the record of one rank."""
    sizes = (2, 4, 8)
    found = run_jobs(1, record_on_rank, [(SETTINGS | KINDS[kind] | {"gbsz": size},) for size in sizes])
    return {size: record for size, ((record, _),) in zip(sizes, found, strict=True)}


@OF_CASE
def test_every_slot_is_counted_once(layout, kind, accumulation):
    settings = job_settings(layout, kind, accumulation)
    record, rows = found(LAYOUTS[layout][0])[layout, kind, accumulation]
    slots = ITERATIONS * settings["gbsz"] * settings["seq_len"] * settings["topk"]
    assert [layer["layer"] for layer in record["experts"]] == [2, 3, 4]
    for layer in record["experts"]:
        assert sum(layer["tokens_per_expert"]) == slots
        dropped = layer["dropped_fraction"] * slots
        assert dropped == round(dropped)
        assert (dropped > 0) == (kind == "capacity")
    dropped = sum(layer["dropped_fraction"] * slots for layer in record["experts"])
    assert rows + dropped == len(record["experts"]) * slots


@OF_CASE
def test_the_numbers_are_those_of_one_rank(layout, kind, accumulation):
    settings = job_settings(layout, kind, accumulation)
    record, _ = found(LAYOUTS[layout][0])[layout, kind, accumulation]
    expected = on_one_rank(kind)[settings["gbsz"]]
    for layer, other in zip(record["experts"], expected["experts"], strict=True):
        assert layer["tokens_per_expert"] == other["tokens_per_expert"]
        for key in PER_LAYER:
            assert layer[key] == pytest.approx(other[key], rel=1e-5), key
        assert layer["aux_losses"] == pytest.approx(other["aux_losses"], rel=1e-5)
        assert set(layer["aux_losses"]) == {"aux_loss", "seq_aux_loss"}
        assert layer["aux_losses"]["aux_loss"] == pytest.approx(layer["load_balancing_loss"], rel=1e-12)
    for key in ("lm_loss", "load_balancing_loss", "z_loss", "params_norm"):
        assert record[key] == pytest.approx(expected[key], rel=1e-5), key
    assert record["aux_losses"] == pytest.approx(expected["aux_losses"], rel=1e-5)


def test_a_dense_model_has_no_expert_records():
    (((record, rows),),) = run_jobs(1, record_on_rank, [(SETTINGS | {"use_moe": False, "gbsz": 4},)])
    assert (record["experts"], record["aux_losses"], rows) == ([], {}, 0)
    assert record["load_balancing_loss"] is record["z_loss"] is None
    assert record["lm_loss"] > 0


def test_dead_experts_and_top1_weight_by_hand():
    settings = {"num_experts": 4, "topk": 2, "aux_loss_type": "none", "gpus_per_node": 1}
    config = load_config(SETTINGS | settings, {})
    # 1000 tokens, 2000 slots: a fair share is 500, and 4 is under 1% of it, 5 is not.
    row = [1000.0, 991.0, 5.0, 4.0, 100.0, 693.0, 600.0, 40.0, 24.0, 8.0, 1000.0]
    assert expert_record(2, row, config, num_shares=16) == {
        "layer": 3, "tokens_per_expert": [1000, 991, 5, 4], "max_over_mean": 2.0, "z_loss": 0.5,
        "microbatch_max_over_mean": 2.5, "dead_fraction": 0.25, "dropped_fraction": 0.05, "aux_losses": {},
        "experts_per_token": 2.0, "router_entropy": 0.693, "top1_weight": 0.6, "load_balancing_loss": 1.5,
    }  # fmt: skip


def bad_iterations_on_rank(port: int) -> dict[str, Any]:
    """On a rank: the record of ten iterations of a ramp, of which two have losses that are not finite."""
    os.environ["MASTER_PORT"] = str(port)
    dense = {"use_moe": False, "first_k_dense": 0, "aux_loss_type": "none"}
    ramp = {"gpus_per_node": 2, "train_iters": 30, "gbsz": 8, "rampup_batch_size": "4 4 40"}
    config = load_config(SETTINGS | dense | ramp, {})
    rank = runtime.start(config)
    interval, progress = Interval(config, rank, build_model(config, rank)), Progress()
    for iteration in range(10):
        is_bad = iteration == 3 or (iteration == 5 and rank.rank == 1)
        loss = torch.tensor([math.nan if is_bad else 64.0, 64])
        interval.add([loss], num_microbatches=1, batch_size=4, flops=1)
        progress.add(config, 4, flops=1)
    record = interval.record(progress, learning_rate=0.0, grad_norm=None, num_zeros=None, loss_scale=1.0)
    runtime.stop()
    return dict(record)


def test_an_iteration_is_bad_once_and_the_ramp_is_in_the_eta():
    for record in run_jobs(2, bad_iterations_on_rank, [()])[0]:
        assert record["nan_iterations"] == 2
        # 40 samples are done; the 20 iterations to come have 8 each.
        seconds_per_sample = record["elapsed_time_per_iteration_ms"] / 1e3 * 10 / 40
        assert record["eta_seconds"] == pytest.approx(160 * seconds_per_sample, rel=1e-9)


# Values of an iteration that every rank knows


def on_rank(stops: list[str], writing: list[bool], losses: list[list[tuple[float, int]]]) -> IterationEnd:
    rank, groups = dist.get_rank(), SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0))
    job = SimpleNamespace(runtime=SimpleNamespace(groups=groups, device=torch.device("cpu")))
    step = SimpleNamespace(losses=[torch.tensor(loss) for loss in losses[rank]])
    return end_iteration(job, step, stops[rank], is_writing=writing[rank])()


@pytest.mark.parametrize(
    ("stops", "writing", "losses", "expected"),
    [
        (
            ["", ""],
            [False] * 2,
            [[(1.0, 1), (2.0, 1)], [(3.0, 1), (6.0, 1)]],
            ("", False, 3.0),
        ),
        # the first of the reasons that any rank has, and a rank without losses, as of an early stage
        (
            ["EXIT", "SIGTERM"],
            [False, True],
            [[], [(1.0, 1), (8.0, 5)]],
            ("SIGTERM", True, 1.5),
        ),
        # of one rank no token counts
        (["", "EXIT"], [True, False], [[(0.0, 0)], [(9.0, 2)]], ("EXIT", True, 4.5)),
    ],
)
def test_every_rank_knows_the_mean_loss_and_why_to_stop(stops, writing, losses, expected):
    assert [end[1:] for end in run_on_ranks(2, on_rank, stops, writing, losses)] == [expected, expected]


def test_a_loss_that_is_not_finite_reaches_every_rank():
    for end in run_on_ranks(2, on_rank, ["", ""], [False, False], [[(1.0, 1)], [(float("nan"), 1)]]):
        assert end.lm_loss != end.lm_loss
