"""QK-clip: logits of the same samples before and after, and training in other layouts."""

from typing import Any

import pytest
import torch

from helpers.checkpoint.legs import Leg, deviations, run_legs, start_job, write_data
from helpers.ranks import run_jobs
from moe_exp.checkpoint.state import Progress
from moe_exp.engine import runtime
from moe_exp.engine.qk_clip import _scale_rows, attention_cores
from moe_exp.training import loop
from moe_exp.training.interval import Interval
from moe_exp.training.metrics import curves

BASE: dict[str, Any] = {"distributed_optimizer": False, "qk_clip": 0.02, "warmup_iters": 0}
MLA: dict[str, Any] = {
    "multi_latent_attention": True, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip


def clipped(settings: dict[str, Any], port: int) -> Any:
    """Largest logits of the first layer's heads, before and after a step that only clips, whether the model's
    weights are the rounded main weights and projections of values (8 rows a head) did not change, and the
    record.
    """
    job = start_job(BASE | {"gpus_per_node": 1, "lr": 1e-12, "min_lr": 0} | settings, port)
    config, model = job.config, job.trained.model
    parameters = dict(model[0].named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name.endswith("linear_qkv.bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(1), std=0.1)
    interval, progress = Interval(config, job.runtime, model), Progress()
    loop.forward_backward(job, job.train_stream, 0, 1)
    core = attention_cores(model)[0]
    before, core.max_logit = core.take_max_logits(), None
    for other in attention_cores(model)[1:]:
        other.take_max_logits()
        other.max_logit = None
    name = "kv_up_proj" if config.multi_latent_attention else "qkv"
    (stored,) = (p for key, p in parameters.items() if f"layers.0.self_attention.linear_{name}.weight" in key)
    heads = config.num_heads if config.multi_latent_attention else config.num_query_groups
    values = stored.detach().view(heads, -1, stored.size(1))[:, -8:].clone()
    loop.train_step(job, progress, interval, count_zeros=False)
    same_values = torch.allclose(stored.view(heads, -1, stored.size(1))[:, -8:], values, rtol=1e-6)
    record = interval.record(progress, learning_rate=0.0, grad_norm=None, num_zeros=None, loss_scale=1.0)
    loop.forward_backward(job, job.train_stream, 0, 1)
    pairs = [(p, p.main_param) for p in parameters.values() if hasattr(p, "main_param")]
    is_rounded = all(torch.equal(p, main.to(p.dtype)) for p, main in pairs)
    runtime.stop()
    after = core.take_max_logits().tolist()
    return before.tolist(), after, is_rounded and same_values, record["max_attention_logits"]


# Limits between the largest logits of two groups, or heads, at the start.
MODELS: list[dict[str, Any]] = [
    {"qkv_bias": True, "qk_clip": 0.078},
    {"dtype": "bf16", "qk_clip": 0.06},
    MLA | {"q_lora_rank": 16, "qk_clip": 0.0016},
    MLA | {"q_lora_rank": 0, "qk_clip": 0.021},
]


def test_a_step_brings_the_largest_logit_to_the_limit(tmp_path):
    """gbsz = mbsz: the step and the passes around it have the same samples."""
    data = {"train_data": str(write_data(tmp_path)), "gbsz": 2, "mbsz": 2, "adam_eps": 1.0}
    found = run_jobs(1, clipped, [(data | model,) for model in MODELS])
    for model, ((before, after, is_right, record),) in zip(MODELS, found, strict=True):
        assert record[0] == pytest.approx(max(before)) and len(record) == 4
        size = 1 if model.get("multi_latent_attention") else 2  # heads of a group
        for start in range(0, len(before), size):
            heads = slice(start, start + size)
            factor = min(1.0, model["qk_clip"] / max(before[heads]))
            expected = [factor * logit for logit in before[heads]]
            assert after[heads] == pytest.approx(expected, rel=0.02 if model.get("dtype") else 1e-5)
        assert min(before) < model["qk_clip"] < max(before)
        assert is_right


def test_the_norm_of_a_fused_linear_is_not_scaled():
    linear = torch.nn.Linear(3, 4)
    linear.layer_norm_weight = torch.nn.Parameter(torch.ones(4))
    before = linear.weight.detach().clone()
    with torch.no_grad():
        _scale_rows(linear, [(torch.tensor([0.5, 0.25]), 2)])
    assert linear.layer_norm_weight.tolist() == [1, 1, 1, 1]
    assert torch.equal(linear.weight, before * torch.tensor([0.5, 0.5, 0.25, 0.25])[:, None])


def test_a_run_logs_the_largest_logits(session_runs):
    settings = {"QK_CLIP": 50, "DISTRIBUTED_OPTIMIZER": False, "TRAIN_ITERS": 2, "WARMUP_ITERS": 0}
    ended = session_runs.succeed("clipped", LOG_INTERVAL=1, GPUS_PER_NODE=1, EP=1, **settings)
    logits = ended.curve("max_attention_logits")
    assert len(logits) == 2 and all(0 < logit < 50 for layers in logits for logit in layers)
    (record, *_) = ended.records("train")
    assert curves(record)["train/max_attention_logit"] == pytest.approx(max(record["max_attention_logits"]))


def _legs(num_ranks: int, layouts: list[dict[str, Any]], **settings: Any) -> list[Any]:
    common = {"optimizer": "muon", "lr": 5e-3, "min_lr": 0.0, "mbsz": 4, "gpus_per_node": num_ranks}
    return run_legs([Leg(BASE | settings | common | layout, steps=4) for layout in layouts])


@pytest.mark.parametrize(
    "layouts",
    [[{}, {"tp": 2}], pytest.param([{"cp": 2}, {"pp": 2}, {"ep": 2}], marks=pytest.mark.slow)],
)
def test_every_layout_clips_alike(layouts, tmp_path):
    data = str(write_data(tmp_path))
    expected, without = _legs(1, [{}, {"qk_clip": 0}], train_data=data)
    for steps in _legs(2, layouts, train_data=data):
        assert deviations(steps, expected)["lm_loss"] < 1e-5
        assert deviations(steps, expected)["params_norm"] < 1e-6
    assert deviations(without, expected)["params_norm"] > 1e-4
