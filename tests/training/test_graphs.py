"""CUDA graphs of micro-batches, proved without a GPU: a stand-in for the graph runs the region again on the
static inputs. What a capture would break shows: losses, counts, addresses, results kept by Python.
"""

import gc
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.checkpoint.legs import MODEL, Step, _step, start_job, write_data
from helpers.checkpoint.small_job import run_to_end, small_settings, write_tokens
from helpers.ranks import RankError, free_port, in_turn, run_on_ranks
from moe_exp.checkpoint.state import Progress
from moe_exp.config import load_config
from moe_exp.engine import runtime
from moe_exp.engine.graphs import choose_graph
from moe_exp.engine.model import moe_layers
from moe_exp.host.exit_codes import BAD_INPUT
from moe_exp.layers.kernels import launch
from moe_exp.layers.statistics import MoEStatistics
from moe_exp.training import loop, microbatch
from moe_exp.training.interval import Interval
from moe_exp.training.microbatch import build_graphs, start_graphs
from moe_exp.training.step import average_weights

from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


class StandIn:
    """Runs the region at each replay, and records which tensors from outside it uses."""

    made: ClassVar[list["StandIn"]] = []
    error = 0.0  # added to the result
    fails = False  # its capture

    def __init__(self) -> None:
        self.addresses: list[list[int]] = []
        StandIn.made.append(self)

    def capture(self, region: Callable[[], Tensor]) -> Tensor:
        if StandIn.fails:
            region()
            raise RuntimeError("capture invalidated")
        self.region, self.result = region, torch.full((2,), torch.nan)
        return self.result

    def replay(self) -> None:
        with Outside() as outside:
            result = self.region()
        self.addresses.append(outside.found)
        self.result.copy_(result + StandIn.error)
        del result
        if len(self.addresses) <= 2:
            outside.close()


class Outside(TorchDispatchMode):
    """Finds the addresses of tensors that are used inside and were not made there, and what outlives it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []
        self._inside: set[int] = set()
        self._kept: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.numel():
                address = x.untyped_storage().data_ptr()
                if address not in self._inside and address not in self.found:
                    self.found.append(address)
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.numel() and x.untyped_storage().data_ptr() not in self.found:
                self._inside.add(x.untyped_storage().data_ptr())
                self._kept.append(x.detach())
        return result

    def close(self) -> None:
        """Fails if Python code keeps a tensor that was made inside: in a replay, that code does not run."""
        made = [(x.shape, StorageWeakRef(x.untyped_storage())) for x in self._kept]
        self._kept.clear()
        gc.collect()
        # the scale of the auxiliary losses is set anew, inside, before each use
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        known = [] if scale is None else [StorageWeakRef(scale.untyped_storage())]
        left = {shape for shape, storage in made if not storage.expired() and storage not in known}
        assert not left, left


def trained(settings: dict[str, Any], port: int, with_graphs: bool) -> list[Step]:
    launch.INTERPRETED = False  # the plain-torch references, which are much faster
    job = start_job(settings, port)
    eod_id = 1 if job.config.eod_mask_loss else None
    job = replace(job, eod_id=eod_id, valid_stream=job.train_stream)
    if with_graphs:
        job = replace(job, graphs=build_graphs(job.trained.model, StandIn))
    interval, progress, steps = Interval(job.config, job.runtime, job.trained.model), Progress(), []
    num_steps = 6 if job.config.data_stages else 4  # each shape is first trained without a graph
    for step in range(num_steps):
        if step == num_steps // 2:  # without graphs, and with averaged weights if there are any
            loop.validate(job, progress, None)
        done = loop.train_step(job, progress, interval, count_zeros=False)
        average_weights(job, progress, interval)
        steps.append(_step(job, progress, interval, done.grad_norm))
    for one in StandIn.made:
        assert one.addresses and all(found == one.addresses[0] for found in one.addresses)
    assert bool(StandIn.made) == with_graphs
    StandIn.made.clear()
    runtime.stop()
    return steps


def on_rank(jobs):
    return in_turn(trained, jobs)


MODELS = {
    "dense": {"use_moe": False},
    "moe": {"moe_type": "moe", "expert_backend": "triton"},
    "dmoe": {"moe_type": "dmoe", "expert_backend": "triton"},
}
VARIANTS = {
    "state of the router": {"router_score": "sigmoid", "router_bias_update_rate": 0.01},
    "state of the loss": {"aux_loss_type": "global_aux_loss,seq_aux_loss", "aux_loss_coeff": "0.01,0.01"},
    "EMA": {"ema_decay": 0.9},
    "Muon": {"optimizer": "muon", "distributed_optimizer": "false"},
    "QK-clip": {"qk_clip": 1.0, "distributed_optimizer": "false"},
    "other shapes and numbers": {
        "rampup_batch_size": "2 2 4", "data_stages": '[{"from_samples": 8, "seq_len": 32}]',
    },
    "masked losses": {"eod_mask_loss": "true"},
    "linear loss": {"cross_entropy": "linear"},
    "recompute": {"recompute_modules": "norm,router,moe_act,experts"},
    "gradients in bf16": {"dtype": "bf16", "grad_dtype": "bf16", "recompute": "moe_act"},
}  # fmt: skip


VARIED = [MODELS["dmoe"] | changes for changes in VARIANTS.values()]


@pytest.mark.parametrize(
    ("num_ranks", "models"),
    [
        (1, [*MODELS.values(), *VARIED[:2], VARIED[5]]),
        pytest.param(1, VARIED[2:5] + VARIED[6:], marks=pytest.mark.slow),
        # capacity with padding has static rows
        (2, [MODELS["dense"], MODELS["dmoe"], MODELS["moe"] | {"ep": 2}]),
    ],
    ids=["1", "1, others", "2"],
)
def test_steps_with_graphs_are_those_without(num_ranks, models, tmp_path):
    sizes = {"gpus_per_node": num_ranks, "overlap": "false", "cross_entropy": "triton", "eval_iters": 1}
    # two layers, and two micro-batches per rank and iteration
    sizes |= {"num_layers": 2, "mbsz": 2 // num_ranks, "gbsz": 4}
    data = sizes | {"train_data": str(write_data(tmp_path)), "run_dir": str(tmp_path / "run")}
    jobs = [(data | one, free_port(), graphs) for one in models for graphs in (False, True)]
    for found in run_on_ranks(num_ranks, on_rank, jobs, join=False, timeout=300):
        for eager, graphed in zip(found[::2], found[1::2], strict=True):
            assert graphed == eager


def start_on_rank(settings: dict[str, Any], error: float | None) -> tuple[str, list[float], Any]:
    """What `start_graphs` says of a graph whose results are off by `error` (None: its capture fails), and
    what it leaves behind.
    """
    launch.INTERPRETED = False
    StandIn.error, StandIn.fails = error or 0.0, error is None
    job = start_job(settings, int(os.environ["MASTER_PORT"]))
    (chunk,), layers = job.trained.model, [one for _, one in moe_layers(job.trained.model)]
    bias = layers[0].router.expert_bias
    bias += 1
    before = [x.clone() for x in layers[0].router.buffers()]
    with patch.object(microbatch, "CudaGraph", StandIn):
        graphs, failure = start_graphs(
            job.config, job.runtime, job.trained.model, job.train_stream, Progress(), None
        )
    assert (graphs is None) == bool(failure)
    assert all(torch.equal(a, b) for a, b in zip(layers[0].router.buffers(), before, strict=True))
    grads = sum(float(p.main_grad.abs().sum()) for p in chunk.parameters())
    return failure, [grads, *(float(x.statistics.sums.sum()) for x in layers)], graphs is not None


ONE = MODELS["dmoe"] | VARIANTS["state of the router"] | {"gpus_per_node": 1, "cross_entropy": "triton"}


def test_start_graphs_compares_and_leaves_nothing_behind(tmp_path):
    settings = ONE | {"train_data": str(write_data(tmp_path)), "run_dir": str(tmp_path / "run")}
    cases = ((0.0, "^$"), (1e-3, "^1 of [0-9]+ losses and gradients differ"), (None, "capture invalidated"))
    for error, expected in cases:
        ((failure, left, _),) = run_on_ranks(1, start_on_rank, settings, error, join=False)
        assert re.search(expected, failure)
        assert set(left) == {0.0}
    with pytest.raises(RankError, match=r"CUDA_GRAPH=on: .*1 of [0-9]+ losses"):
        run_on_ranks(1, start_on_rank, settings | {"cuda_graph": "on"}, 1e-3, join=False)


def test_a_graph_that_is_requested_and_not_possible_ends_the_run(tmp_path):
    write_tokens(tmp_path)
    code, printed = run_to_end(small_settings(tmp_path, "run", cuda_graph="on"))
    assert code == BAD_INPUT
    lines = [line for line in printed.splitlines() if line.startswith("moe-exp: ")]
    assert lines == ["moe-exp: CUDA_GRAPH=on: requires a GPU. Fix: set CUDA_GRAPH=auto."]


def choice(backend: str = "triton", overlaps: bool = False, **settings: Any) -> tuple[str, str]:
    config = load_config(MODEL | settings, {})
    return choose_graph(config, device_type="cuda", expert_backend=backend, overlaps=overlaps)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tp": 2}, "TP=2"),
        ({"pp": 2}, "PP=2"),
        ({"cp": 2}, "CP=2"),
        ({"ep": 2}, "EP=2 without PAD_TO_CAPACITY"),
        ({"ep": 2, "moe_type": "moe", "pad_to_capacity": "false"}, "EP=2 without PAD_TO_CAPACITY"),
        ({"document_mask": "true"}, "DOCUMENT_MASK"),
        ({"aux_loss_type": "sinkhorn", "aux_loss_coeff": "0"}, "AUX_LOSS_TYPE=sinkhorn"),
        ({"router_score": "relu", "aux_loss_type": "l1"}, "ROUTER_SCORE=relu"),
        ({"dropout": 0.1}, "DROPOUT"),
        ({"router_jitter": 0.1}, "ROUTER_JITTER"),
        ({"router_top_p": 0.5}, "ROUTER_TOP_P"),
        ({"token_rounding": 8}, "TOKEN_ROUNDING"),
        ({"moe_type": "moe", "pad_to_capacity": "false"}, "PAD_TO_CAPACITY"),
        ({"document_packing": "best_fit"}, "DOCUMENT_PACKING=best_fit"),
        ({"recompute": "full"}, "RECOMPUTE=full"),
        ({"recompute": "selective"}, "RECOMPUTE=selective"),
        (
            {"recompute_modules": "norm,core_attn"},
            "RECOMPUTE_MODULES with mla_up_proj, shared_expert or core_attn",
        ),
        ({"log_timers": "true"}, "LOG_TIMERS"),
        ({"dtype": "fp16"}, "DTYPE=fp16"),
        ({"cuda_graph": "off"}, "requested by CUDA_GRAPH"),
        ({"backend": "loop"}, "EXPERT_BACKEND=loop"),
        ({"overlaps": True}, "OVERLAP=false"),
    ],
)
def test_choose_graph_names_what_prevents_it(settings, reason):
    state, found = choice(**settings)
    assert state == "off" and reason in found
    if settings.keys().isdisjoint({"cuda_graph", "backend", "overlaps"}):
        problems = load_config(MODEL | settings | {"cuda_graph": "on"}, {}).problems()
        assert any(line.startswith("CUDA_GRAPH=on") and reason in line for line in problems)


def test_choose_graph_takes_one():
    assert choice()[0] == choice(moe_type="moe", ep=2)[0] == choice("", use_moe=False)[0] == "on"
    assert choice(overlaps=True, cuda_graph="on")[0] == "on"
    assert choose_graph(load_config(MODEL, {}), device_type="cpu") == ("off", "requires a GPU")


def test_statistics_refuse_another_capture(monkeypatch):
    statistics = MoEStatistics(4, [], torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"replays of a CUDA graph .* CUDA_GRAPH=off"):
        statistics.add(None, None, load_balancing_loss=None, z_loss=None, aux_losses={})
