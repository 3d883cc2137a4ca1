"""Filler is as if it were not there, and a masked micro-batch takes no part in a mean; in every layout."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.documents_on_ranks import built
from helpers.model_on_ranks import EOD, Found, assembled_job, parameter_pieces
from helpers.ranks import run_jobs
from helpers.relative_error import assert_equal_to
from moe_exp.checkpoint.state import Progress
from moe_exp.data.samples.dataset import DataStage, filler_mask
from moe_exp.engine import runtime
from moe_exp.training import loop
from moe_exp.training.interval import Interval

LIMIT = 1e-10
MODEL = {
    "document_mask": False, "eod_mask_loss": True, "mbsz": 1, "gbsz": 8, "log_interval": 1, "eval_iters": 1,
    "num_layers": 4,
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "recompute": (1, {"recompute": "full"}),
    "DP2": (2, {}),
    "TP2": (2, {"tp": 2}),
    "CP2": (2, {"cp": 2}),
    "PP2, VPP2": (2, {"pp": 2, "vpp": "2"}),
    "DP4, EP2": (4, {"ep": 2}),
    "TP2, PP2, recompute": (4, {"tp": 2, "pp": 2, "recompute": "selective"}),
}
FAST = ("one", "TP2")
LAYOUT = pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in LAYOUTS]
)


def test_filler_by_hand():
    """0 ends a document: the first of those at the end ends the last one, and the label is no input."""
    tokens = torch.tensor([[5, 0, 0, 6, 0, 0, 0], [1, 0, 3, 4, 5, 0, 0], [1, 2, 3, 4, 5, 6, 0], [0] * 7])
    assert filler_mask(tokens, 0).int().tolist() == [
        [0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 1],
    ]


class Rows:
    """Sample i is row i of `tokens`, [num, S1]."""

    def __init__(self, tokens: Tensor, *, has_filler: bool = False):
        self.tokens, self.stage = tokens, DataStage(0, tokens.size(1) - 1, has_filler)

    def stage_at(self, index: int) -> DataStage:
        return self.stage

    def batch(self, first: int, count: int) -> Tensor:
        return self.tokens[first : first + count]


def _one_batch(settings: dict[str, Any], tokens: Tensor, has_filler: bool, port: int) -> tuple[Any, ...]:
    """Gradients of a global batch, its train record, and its loss as guard and validation have it."""
    job = built(MODEL | settings, port)
    config, model, groups = job.config, job.trained.model, job.runtime.groups
    job.valid_stream = Rows(tokens, has_filler=has_filler)
    loop.optimizer_setup.set_megatron_hooks(model, job.trained.optimizer)
    interval, num = Interval(config, job.runtime, model), config.num_microbatches
    losses = loop.forward_backward(job, job.valid_stream, 0, num)
    interval.add(losses, num_microbatches=num, batch_size=config.gbsz, flops=1)
    step = SimpleNamespace(losses=losses)
    end = loop.end_iteration(job, step, "", is_writing=False)()
    pieces = [piece for chunk in model for piece in parameter_pieces(chunk.module, groups)]
    values = {"learning_rate": 0.0, "grad_norm": None, "num_zeros": None, "loss_scale": 1.0}
    record = interval.record(Progress(1, config.gbsz), **values)
    with torch.no_grad():
        for chunk in model:
            chunk.eval()
        valid = loop.mean_valid_loss(job)
    runtime.stop()
    return {"losses": {0: torch.zeros(2)}, "norms": [], "pieces": pieces}, record, end.lm_loss, valid


def run(num_ranks: int, *jobs: tuple[Any, Tensor, bool]) -> list[tuple[Found, dict[str, Any], Any]]:
    """Gradients, train record, losses of guard and validation of each job."""
    of_jobs = run_jobs(num_ranks, _one_batch, jobs)
    return [(assembled_job([one[0] for one in of]), of[0][1], of[0][2:]) for of in of_jobs]


NUM_REAL, NUM_FILLED = 16, 24
ROUTED = {
    "moe_type": "moe", "capacity_factor": 0.9, "pad_to_capacity": False, "z_loss_coeff": 0.01,
    "aux_loss_type": "aux_loss,seq_aux_loss", "aux_loss_coeff": "0.02,0.03",
    "mbsz": 2, "shared_expert_size": 32, "first_k_dense": 1,
}  # fmt: skip
KINDS = {"probs": ROUTED, "position, padded": ROUTED | {"drop_policy": "position", "pad_to_capacity": True}}


def _filled() -> tuple[Tensor, Tensor]:
    """The same eight samples with filler and without."""
    tokens = torch.randint(1, 200, (8, NUM_REAL + 1), generator=torch.Generator().manual_seed(1))
    tokens[:, 5] = tokens[:, NUM_REAL - 1 :] = EOD
    filler = torch.full((8, NUM_FILLED - NUM_REAL), EOD)
    return torch.cat([tokens, filler], dim=1), tokens


@cache
def _without_filler() -> dict[str, Any]:
    jobs = [(kind | {"seq_len": NUM_REAL}, _filled()[1], False) for kind in KINDS.values()]
    return dict(zip(KINDS, run(1, *jobs), strict=True))


@LAYOUT
def test_filler_is_as_if_it_were_not_there(layout):
    num_ranks, sizes = LAYOUTS[layout]
    jobs = [(kind | {"seq_len": NUM_FILLED} | sizes, _filled()[0], True) for kind in KINDS.values()]
    for name, (ours, record, losses) in zip(KINDS, run(num_ranks, *jobs), strict=True):
        right, expected, right_losses = _without_filler()[name]
        assert_equal_to(LIMIT, ours.gradients, right.gradients)
        assert losses == pytest.approx(right_losses, rel=LIMIT)
        for key in ("lm_loss", "load_balancing_loss", "z_loss"):
            assert record[key] == pytest.approx(expected[key], rel=LIMIT)
        assert len(record["experts"]) == 3
        for layer, other in zip(record["experts"], expected["experts"], strict=True):
            assert layer["tokens_per_expert"] == other["tokens_per_expert"]
            assert sum(layer["tokens_per_expert"]) == 8 * NUM_REAL * 2
            assert layer["dropped_fraction"] == other["dropped_fraction"] > 0.1
            assert layer["router_entropy"] == pytest.approx(other["router_entropy"], rel=LIMIT)


COUNTING = [0, 4, 5]  # of eight samples; of four data parallel ranks two have no token that counts


def _masked() -> Tensor:
    """Samples of which all but these are masked completely."""
    tokens = torch.randint(1, 200, (8, 17), generator=torch.Generator().manual_seed(2))
    tokens[4, :11] = EOD  # so that means over micro-batches and over tokens differ
    tokens[[index for index in range(8) if index not in COUNTING]] = EOD
    return tokens


DROPLESS = {"moe_type": "dmoe", "seq_len": 16}


@cache
def _counting() -> tuple[Found, dict[str, Any], Any]:
    return run(1, (DROPLESS | {"gbsz": len(COUNTING)}, _masked()[COUNTING], False))[0]


@LAYOUT
def test_a_masked_microbatch_takes_no_part_in_a_mean(layout):
    num_ranks, sizes = LAYOUTS[layout]
    right, expected, right_losses = _counting()
    ((ours, record, losses),) = run(num_ranks, (DROPLESS | sizes, _masked(), False))
    assert_equal_to(LIMIT, ours.gradients, right.gradients)
    assert record["lm_loss"] == pytest.approx(expected["lm_loss"], rel=LIMIT)
    assert losses == pytest.approx((expected["lm_loss"],) * 2, rel=LIMIT)
    assert losses == pytest.approx(right_losses, rel=LIMIT)


def test_a_batch_without_a_token_that_counts_has_no_loss():
    ((ours, record, losses),) = run(2, (DROPLESS, torch.full((8, 17), EOD), False))
    assert torch.tensor([record["lm_loss"], *losses]).isnan().all()
    assert record["nan_iterations"] == 0
    assert not any(gradient.any() for gradient in ours.gradients.values())
