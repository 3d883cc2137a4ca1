"""A NaN or an infinity on one rank: no rank makes the step, and training continues as without that batch."""

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.checkpoint.small_job import build_small, small_settings, write_tokens
from helpers.ranks import run_jobs
from moe_exp.checkpoint.state import unwrapped
from moe_exp.engine import runtime
from moe_exp.engine.optimizer_setup import skip_steps_not_finite
from moe_exp.training import loop
from moe_exp.training.interval import Interval
from moe_exp.training.microbatch import lm_loss

FRACTIONS = {"router_score": "sigmoid", "aux_loss_type": "global_aux_loss", "aux_loss_coeff": "0.01"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {},
    "EP=2": {"gpus_per_node": 2, "ep": 2, "router_bias_rule": "quantile"} | FRACTIONS,
    "EP=2, whole optimizer": {"gpus_per_node": 2, "ep": 2, "distributed_optimizer": False, "clip_grad": 0.0}
    | {"ema_decay": 0.7},
    "PP=2": {"gpus_per_node": 2, "pp": 2, "overlap": "true", "ema_decay": 0.7, "topk": 1}
    | {"router_score": "relu", "aux_loss_type": "l1", "aux_loss_coeff": "0.1"},
    "TP=2, bf16": {"gpus_per_node": 2, "tp": 2, "dtype": "bf16"},
    "Muon": {"gpus_per_node": 2, "optimizer": "muon", "distributed_optimizer": False},
    "EP=2, PP=2": {"gpus_per_node": 4, "ep": 2, "pp": 2, "router_bias_update_rate": 0.01} | FRACTIONS,
}
BAD_ITERATION = 3


def trained(settings: dict[str, Any], fault: str, port: int) -> dict[str, Any]:
    """Five iterations; in the third, the last rank has the `fault`, or it is not made at all."""
    job, progress = build_small(settings, port)
    config, is_last = job.config, torch.distributed.get_rank() == job.config.world_size - 1
    job.trained.optimizer.zero_grad()
    state = job.trained.model[-1].module.state_dict()
    routers = {name: tensor for name, tensor in state.items() if ".router." in name}
    if config.router_score == "relu" and is_last:
        for name, tensor in routers.items():
            tensor.mul_(0 if name.endswith("weight") else 1)  # tokens have no expert in the last stage
    interval = Interval(config, job.runtime, job.trained.model)
    found: dict[str, Any] = {"steps": [], "states": []}
    for iteration in range(1, 6):
        if iteration == BAD_ITERATION and fault == "left out":
            progress.consumed_samples += config.gbsz
            continue
        before, has_fault = _state(job), iteration == BAD_ITERATION and fault and is_last
        with _broken(job, fault) if has_fault else contextlib.nullcontext():
            step = loop.train_step(job, progress, interval, count_zeros=True)
        rate = job.trained.optimizer.param_groups[0]["lr"]
        found["steps"].append((step.updated, step.grad_norm, rate))
        found["states"].append(before == _state(job))
    found["state"] = _state(job)
    buffers = [pair for chunk in job.trained.model for pair in chunk.named_buffers()]
    found["biases"] = [
        bias.abs().sum().item() for name, bias in buffers if name.endswith("router.expert_bias")
    ]
    found["l1_factors"] = [tensor.item() for name, tensor in routers.items() if name.endswith("l1_factor")]
    values = {"learning_rate": 0.0, "grad_norm": None, "num_zeros": None, "loss_scale": 1.0}
    found["record"] = interval.record(progress, **values)
    found["skipped"] = progress.skipped_iterations
    runtime.stop()
    return found


def _state(job: Any) -> list[bytes]:
    """Weights, what the routers keep, and the optimizer's tensors, to the bit."""
    values = [value for chunk in job.trained.model for value in chunk.module.state_dict().values()]
    for part in job.trained.optimizer.chained_optimizers:
        for parameter in (parameter for group in part.param_groups for parameter in group["params"]):
            state = part.optimizer.state[parameter]
            values += [parameter, *(state[name] for name in sorted(state))]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [tensor.detach().float().numpy().tobytes() for tensor in tensors]


@contextlib.contextmanager
def _broken(job: Any, fault: str) -> Any:
    """As of a broken device: one wrong number in a gradient, or in the activations of the last layer."""

    def spoil(x: Any) -> Any:
        x = x.clone()
        x.view(-1)[0] = float(fault.split()[0])
        return x

    def forward_hook(module: Any, arguments: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if fault.endswith("gradient"):
            hidden.register_hook(spoil)
            return output
        hidden = spoil(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = unwrapped(job.trained.model[-1]).decoder.layers[-1].register_forward_hook(forward_hook)
    yield
    handle.remove()


FAST = [("EP=2", "nan activation"), ("PP=2", "inf gradient")]
CASES = [(layout, fault) for layout in LAYOUTS for fault in ("nan activation", "inf gradient")]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in FAST]


@pytest.mark.parametrize(("layout", "fault"), [*FAST, *SLOW])
def test_no_rank_makes_the_step(layout, fault, tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "run") | LAYOUTS[layout]
    names = {"faulty": fault, "without": "left out"}
    jobs = [(settings | {"run_name": name}, what) for name, what in names.items()]
    of_ranks = list(zip(*run_jobs(settings["gpus_per_node"], trained, jobs), strict=True))
    if settings.get("router_score") == "relu":  # over TOPK on average, none in the last layer
        factors = [factor for faulty, _ in of_ranks for factor in faulty["l1_factors"]]
        assert len(factors) == settings["num_layers"] and len(set(factors)) == 1 and factors[0] > 1
    for faulty, without in of_ranks:
        assert [updated for updated, _, _ in faulty["steps"]] == [True, True, False, True, True]
        assert not math.isfinite(faulty["steps"][2][1])
        assert faulty["steps"][2][2] == faulty["steps"][1][2] != faulty["steps"][3][2]
        assert faulty["states"] == [False, False, True, False, False]
        assert [step for index, step in enumerate(faulty["steps"]) if index != 2] == without["steps"]
        assert faulty["state"] == without["state"]
        if "router_bias_rule" in settings:  # steps of a fixed size may end where they began
            assert faulty["biases"] and all(faulty["biases"])
        assert faulty["skipped"] == faulty["record"]["skipped_iterations"] == 1
        assert faulty["record"]["nan_iterations"] == (1 if fault == "nan activation" else 0)
        assert math.isfinite(faulty["record"]["lm_loss"])


def test_an_infinite_loss_has_no_finite_gradient():
    losses, mask = torch.tensor([[1.0, torch.inf]], requires_grad=True), torch.ones(1, 2)
    loss, shown = lm_loss(mask, torch.tensor(2), losses)
    loss.backward()
    assert losses.grad is not None
    assert losses.grad.isnan().all()
    assert shown["lm_loss"].tolist() == [torch.inf, 2]
    losses = torch.tensor([[1.0, 3.0]], requires_grad=True)
    lm_loss(mask, torch.tensor(4), losses)[0].backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.25, 0.25]]


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_makes_no_step(norm):
    """Also an infinite one, which backward passes mostly turn into NaN."""

    class Optimizer:
        def get_grad_norm(self):
            return norm

        def step(self):
            return True, self.get_grad_norm(), 0.0

    model, optimizer = torch.nn.Linear(1, 1), Optimizer()
    model.config = SimpleNamespace(finalize_model_grads_func=None)
    skip_steps_not_finite(optimizer, [model])
    assert str(optimizer.step()) == str((False, norm, None))
