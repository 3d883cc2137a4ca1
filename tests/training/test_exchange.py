"""Values of an iteration that every rank knows, from those of each."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_on_ranks
from moe_exp.training.exchange import IterationEnd, end_of_iteration

REASONS = ("time", "signal")


def on_rank(stops: list[str], writing: list[bool], losses: list[list[float]]) -> IterationEnd:
    rank = dist.get_rank()
    return end_of_iteration(
        stop=stops[rank], reasons=REASONS, is_writing=writing[rank],
        losses=[torch.tensor(loss) for loss in losses[rank]],
        num_shares=sum(map(len, losses)), device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stops", "writing", "losses", "expected"),
    [
        (["", ""], [False, False], [[1.0, 2.0], [3.0, 6.0]], IterationEnd("", False, 3.0)),
        # the first of the reasons that any rank has, and a rank without losses, as of an early stage
        (["signal", "time"], [False, True], [[], [1.0, 2.0]], IterationEnd("time", True, 1.5)),
        (["", "signal"], [True, False], [[4.0], [5.0]], IterationEnd("signal", True, 4.5)),
    ],
)
def test_every_rank_knows_the_mean_loss_and_why_to_stop(stops, writing, losses, expected):
    assert run_on_ranks(2, on_rank, stops, writing, losses) == [expected, expected]


def test_a_loss_that_is_not_finite_reaches_every_rank():
    for end in run_on_ranks(2, on_rank, ["", ""], [False, False], [[1.0], [float("nan")]]):
        assert end.lm_loss != end.lm_loss
