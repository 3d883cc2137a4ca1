import pytest

from helpers.planner.planned import A100, LARGE, PRIORS, SMALL, model
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.timing import time_of
from moe_exp.planner.estimate import cost_of, speed_of
from moe_exp.planner.prediction import predict


def seconds_at(config, batch_size=None):
    return time_of(PlannedJob.of(config), A100, PRIORS.time, batch_size=batch_size).total


def test_speed_of_an_iteration():
    config = model(LARGE, nnodes=36, tp=4, pp=1)
    speed = speed_of(config, A100, 100.0)
    assert speed.tokens_per_second == 2048 * 2048 / 100
    assert speed.tflops_per_gpu * 1e12 * 288 * 100 == pytest.approx(flops_per_iteration(config))
    assert speed.mfu == pytest.approx(speed.tflops_per_gpu / 312)


def test_cost_by_iterations():
    config = model(SMALL, train_iters=500, decay_iters=500, warmup_iters=5, mbsz=2)
    cost = cost_of(config, A100, price_per_gpu_hour=2.5, constants=PRIORS)
    assert (cost.num_iterations, cost.num_tokens) == (500, 500 * 32 * 2048)
    assert cost.seconds == pytest.approx(500 * seconds_at(config))
    assert cost.gpu_hours == pytest.approx(cost.seconds * 4 / 3600)
    assert cost.price == pytest.approx(2.5 * cost.gpu_hours)
    assert cost.days == pytest.approx(cost.seconds / 86400)
    assert cost_of(config, A100, constants=PRIORS).price is None


def test_cost_of_a_token_budget():
    config = model(SMALL, mbsz=2)
    for num_tokens, iterations in ((1, 1), (32 * 2048, 1), (32 * 2048 + 1, 2), (10 * 32 * 2048, 10)):
        assert cost_of(config, A100, num_tokens=num_tokens, constants=PRIORS).num_iterations == iterations


def test_small_batches_of_a_ramp_have_their_own_time():
    ramped = model(SMALL, mbsz=2, rampup_batch_size="8 8 96", train_iters=20, decay_iters=20, warmup_iters=1)
    cost = cost_of(ramped, A100, constants=PRIORS)
    # 32 samples at 8, 16 and 24 each: 4, 2 and 2 iterations (the last starts below its end), then 32.
    sizes = [8] * 4 + [16] * 2 + [24] * 2
    sizes += [32] * (20 - len(sizes))
    assert cost.num_iterations == 20
    assert cost.num_tokens == sum(sizes) * 2048
    assert cost.seconds == pytest.approx(sum(seconds_at(ramped, size) for size in sizes))
    constant = cost_of(ramped.model_copy(update={"rampup_batch_size": ""}), A100, constants=PRIORS)
    # The price of a ramp: what an iteration costs whatever its batch is shared by fewer tokens.
    assert constant.seconds / constant.num_tokens < cost.seconds / cost.num_tokens


def test_cost_with_stages():
    """From iteration 100 of 500 on samples are four times as long, a fourth as many."""
    stages = "[{from_samples: 1600, train_data: other}, {from_samples: 3200, seq_len: 8192}]"
    config = model(SMALL, train_iters=500, decay_iters=500, warmup_iters=5, mbsz=4, data_stages=stages)
    longer = config.model_copy(update={"seq_len": 8192, "mbsz": 1, "gbsz": config.gbsz // 4})
    cost = cost_of(config, A100, constants=PRIORS)
    assert (cost.num_iterations, cost.num_tokens) == (500, 500 * 32 * 2048)
    assert cost.seconds == pytest.approx(100 * seconds_at(config) + 400 * seconds_at(longer))
    assert seconds_at(longer) > seconds_at(config)
    # the memory is that of the stage that needs most: a micro-batch has at least one sample
    whole = config.model_copy(update={"mbsz": 1})
    needed, short, long = (
        predict(PlannedJob.of(one), A100, PRIORS).needed_bytes
        for one in (whole, whole.model_copy(update={"data_stages": ""}), longer)
    )
    assert needed == long > 1.1 * short


def test_attention_inside_documents_costs_less():
    config = model(SMALL, train_iters=500, mbsz=2)
    masked = config.model_copy(update={"document_mask": True, "document_tokens": 512.0})
    unknown = config.model_copy(update={"document_mask": True})
    assert flops_per_iteration(unknown) == flops_per_iteration(config)
    scores = config.num_layers * config.num_heads * config.kv_channels * 2 * 3 * config.gbsz * config.seq_len
    assert flops_per_iteration(config) - flops_per_iteration(masked) == scores * (2048 - 512)
    assert seconds_at(masked) < seconds_at(unknown) == seconds_at(config)
