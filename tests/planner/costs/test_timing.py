from dataclasses import replace

import pytest

from helpers.planner.planned import total
from moe_exp.config import Config, load_config
from moe_exp.config.choices import DISPATCHERS, EXPERT_BACKENDS
from moe_exp.planner.costs.activations import activations_of
from moe_exp.planner.costs.device import RECIPIENTS, Pass
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.memory import memory_of
from moe_exp.planner.costs.params import tables_of_stages
from moe_exp.planner.costs.products import PRICED_BACKENDS
from moe_exp.planner.costs.timing import IterationTime, bubble_seconds, time_of
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.measured import MEASURED_RUNS, read_runs
from moe_exp.planner.prediction import load_constants, predict
from moe_exp.planner.views import _scheduled as scheduled

A100 = load_hardware("A100-80GB")
CONSTANTS = load_constants().time
RUNS = {run.row_id: run for run in read_runs(MEASURED_RUNS)}


def config(**settings) -> Config:
    sizes = {
        "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_heads": 32,
        "num_query_groups": 8, "seq_len": 4096, "vocab_size": 32000, "use_moe": False, "gpus_per_node": 8,
        "nnodes": 8, "mbsz": 1, "gbsz": 256, "dtype": "bf16",
    }  # fmt: skip
    return Config(**(sizes | settings))


def seconds(**settings) -> IterationTime:
    return time_of(PlannedJob.of(config(**settings)), A100, CONSTANTS)


MOE = {"use_moe": True, "num_experts": 8, "topk": 2}


def simulated(stages: list[float], num_microbatches: int) -> float:
    """1F1B by its rules, of which a third of a stage's time is forward."""
    passes = [(Pass(seconds / 3, 2 * seconds / 3), Pass(0.0, 0.0)) for seconds in stages]
    return max(event.end for event in scheduled(passes, num_microbatches, 1))


@pytest.mark.parametrize("stages", [[3, 3, 3, 4], [4, 3, 3, 3], [2, 3, 2.5, 2, 2.2, 3]])
def test_bubble_of_uneven_stages_is_near_that_of_the_schedule(stages):
    formula = 24 * sum(stages) / len(stages) + bubble_seconds(stages, 24)
    assert formula == pytest.approx(simulated(stages, 24), rel=0.04)


def test_bubble_by_hand():
    assert bubble_seconds([1.0, 1.0, 2.0, 1.0], 10) == pytest.approx(5 + 9 * 2 - 12.5)
    assert bubble_seconds([2.0] * 4, 10, num_chunks=3) == pytest.approx(2.0)


PARTS = {"tp": "tensor_parallel", "cp": "context_parallel", "pp": "pipeline", "ep": "expert_parallel"}


@pytest.mark.parametrize(("name", "part"), PARTS.items())
def test_a_part_is_there_with_its_parallelism_alone(name, part):
    of_model = MOE if name == "ep" else {}
    alone, split = seconds(**of_model), seconds(**of_model, **{name: 2})
    assert getattr(alone, part) == 0 < getattr(split, part)
    assert sum(split.parts().values()) == split.total


LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "num_heads": 16, "cp": 2,
}  # fmt: skip
ALL_HEADS = {"num_heads": 16, "num_query_groups": 16, "head_dim": 160, "cp": 2}
FEW_ROWS = {"use_moe": True, "topk": 4, "ffn_hidden_size": 1408}
SPREAD = {"use_moe": True, "num_experts": 64, "topk": 4, "ep": 32}


@pytest.mark.parametrize(
    ("part", "settings", "others", "ratio", "error"),
    [
        # keys and values of all latent heads
        ("context_parallel", LATENT, ALL_HEADS, 1.0, 1e-6),
        ("pipeline", {"pp": 4, "vpp": 4}, {"pp": 4}, 4.0, 1e-6),
        # a shared expert gathers its tokens
        ("tensor_parallel", MOE | {"tp": 2, "shared_expert_size": 1024}, MOE | {"tp": 2}, 2.0, 1e-6),
        # a forward pass more, but for the output layer
        ("compute", {"recompute": "full"}, {}, 1.305, 0.042),
        # 273.07 rows each, three tiles instead of two: but what a product sums over needs no alignment
        ("compute", FEW_ROWS | {"num_experts": 60}, FEW_ROWS | {"num_experts": 64}, 1.0, 0.2),
        # once to each of 4 * (1 - (3/4)^4) nodes instead of 4 times
        ("expert_parallel", SPREAD | {"dispatcher": "deepep"}, SPREAD, 2.73 / 4, 0.02),
    ],
)
def test_parts_in_proportion(part, settings, others, ratio, error):
    mine, theirs = (getattr(seconds(**of), part) for of in (settings, others))
    assert mine / theirs == pytest.approx(ratio, rel=error)


@pytest.mark.parametrize(
    ("part", "less", "more"),
    [
        ("bubble", {"pp": 4, "vpp": 4}, {"pp": 4}),
        ("data_parallel", {"overlap": "true", "gbsz": 64}, {"overlap": "false", "gbsz": 64}),
        ("compute", MOE, MOE | {"recompute": "selective"}),
        ("compute", MOE | {"recompute": "selective"}, MOE | {"recompute": "full"}),
        ("expert_parallel", SPREAD, SPREAD | {"dispatcher": "allgather"}),  # rings to all 31 ranks
    ],
)
def test_parts_that_take_less(part, less, more):
    assert getattr(seconds(**less), part) < getattr(seconds(**more), part)


def test_a_smaller_batch_takes_less():
    job = PlannedJob.of(config(pp=4))
    half = time_of(job, A100, CONSTANTS, batch_size=128)
    assert half.compute == pytest.approx(time_of(job, A100, CONSTANTS).compute / 2)
    assert half.bubble == pytest.approx(time_of(job, A100, CONSTANTS).bubble, rel=0.2)


def test_what_bounds_a_job():
    assert seconds(gbsz=4096).bound == "compute"
    assert seconds(pp=8, gbsz=32, nnodes=8).bound == "bubble"
    assert seconds(nnodes=1, gpus_per_node=1).data_parallel == 0


@pytest.mark.parametrize(
    ("slow", "fast"),
    [("r088", "r087"), ("r091", "r089"), ("r017", "r023"), ("r064", "r073"), ("r071", "r074")],
)
def test_cliffs_of_the_measured_runs(slow, fast):
    """Head sizes 108 and 150, hidden 14400 against 13824, TP=8 against TP=4, reduce over the network."""
    measured = RUNS[slow].seconds / RUNS[fast].seconds
    predicted = [time_of(RUNS[name].job, A100, CONSTANTS).total for name in (slow, fast)]
    assert measured > 1.04
    assert predicted[0] / predicted[1] == pytest.approx(measured, rel=0.08)


def test_reference_runs():
    """Milliseconds that were measured on software of 2024."""
    capacity = {"ep": 4, "moe_type": "moe", "expert_backend": "loop"}
    cases = [({"use_moe": False}, 226, 230), (capacity, 600, 638)]
    cases += [({"ep": 4}, 416, 525), ({"ep": 8, "mbsz": 4}, 1532, 1688)]
    for settings, low, high in cases:
        job = PlannedJob.of(load_config({"preset": "reference", "gpus_per_node": 8} | settings, {}))
        milliseconds = 1000 * time_of(replace(job, software="2024-10"), A100, CONSTANTS).total
        assert 0.9 * low < milliseconds < 1.1 * high, settings


def test_selective_recompute_leaves_dense_layers_alone():
    def extra(**settings) -> float:
        return seconds(**MOE, **settings, recompute="selective").compute - seconds(**MOE, **settings).compute

    assert extra(first_k_dense=16) == pytest.approx(extra() / 2, rel=1e-6)


def test_latent_experts_exchange_the_latent_width():
    """Seconds are linear in it, and at the model's width those of tokens that are sent as they are."""
    whole, *parts = (seconds(**SPREAD, moe_latent_size=size) for size in (0, 4096, 3072, 1024))
    sent = [part.expert_parallel for part in parts]
    assert sent[0] == whole.expert_parallel
    assert sent[0] - sent[2] == pytest.approx(3 * (sent[0] - sent[1]), rel=1e-6)
    assert sent[2] < 0.3 * sent[0]
    # Two more products of 4096 x 4096 for each token, against 4 experts of 3 * 4096 * 11008.
    assert 1.02 * whole.compute < parts[0].compute < 1.1 * whole.compute
    assert parts[2].compute < 0.5 * whole.compute


CHOICES = (
    "dispatcher", "recompute", "overlap", "optimizer", "optimizer_state_dtype", "main_params",
    "cross_entropy", "router_score", "router_dtype", "expert_backend", "normalization", "activation",
    "qk_norm_scope",
)  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_without_a_price_is_refused_by_name(name):
    chosen = config(**MOE, ep=8, qk_norm=True, shared_expert_size=64).model_copy(update={name: "new"})
    with pytest.raises(
        ValueError, match=f"^{name.upper()}=new: the planner does not support this value. Fix: use "
    ):
        predict(PlannedJob.of(chosen), A100)


def test_every_dispatcher_and_backend_of_the_registry_is_planned():
    assert RECIPIENTS.keys() == {"auto", *DISPATCHERS}
    assert {name for name, to in RECIPIENTS.items() if to == "all"} == {"allgather"}
    assert set(PRICED_BACKENDS) == {"auto", *EXPERT_BACKENDS}


def test_the_local_dispatcher_has_no_price_between_ranks():
    assert seconds(**MOE, dispatcher="local").expert_parallel == 0
    with pytest.raises(ValueError, match=r"DISPATCHER=local: .* use auto, alltoall, deepep, allgather\."):
        seconds(**MOE, ep=8, dispatcher="local")


def test_padding_to_capacity_is_of_the_whole_microbatch():
    """Each of 4 ranks makes room for its tokens in every expert: four times the rows."""
    capacity = {"moe_type": "moe", "capacity_factor": 1.0, "num_experts": 64, "gbsz": 256}
    alone, split = (seconds(**MOE | capacity, tp=tp).compute for tp in (1, 4))
    # nearly all of it is the experts'; a rank has 4 times as many micro-batches of a fourth of the tokens
    assert split > 2 * alone


def test_an_offloaded_optimizer_takes_the_time_of_the_host():
    """40 bytes of its memory per parameter of the rank, at 60 GB/s; nothing changes on a CPU."""
    settings = {"nnodes": 1, "gpus_per_node": 1, "optimizer": "adam", "dtype": "bf16"}
    jobs = [PlannedJob.of(config(**settings, offload_optimizer=offloads)) for offloads in (False, True)]
    (rank,) = jobs[0].parameters
    before, after = (time_of(job, A100, CONSTANTS).optimizer for job in jobs)
    on_device = 40 * rank.total / (A100.memory_bytes_per_second * CONSTANTS.memory_efficiency)
    assert after - before == pytest.approx(40 * rank.total / 60e9 - on_device, rel=0.05)
    half = config(**settings | {"gpus_per_node": 2, "offload_optimizer": True})
    assert time_of(PlannedJob.of(half), A100, CONSTANTS).optimizer == pytest.approx(after / 2, rel=0.1)
    assert len({time_of(job, load_hardware("cpu"), CONSTANTS) for job in jobs}) == 1


def muon_seconds(**settings) -> float:
    with_adam = seconds(**settings, distributed_optimizer=False)
    return seconds(**settings, distributed_optimizer=False, optimizer="muon").optimizer - with_adam.optimizer


def test_muon_orthogonalizes_whole_matrices():
    """5 * (4*r^2*c + 2*r^3) operations each in fp32, at 0.7 of 19.5 TFLOP/s or more, whatever TP is."""
    extra = muon_seconds(nnodes=1, gpus_per_node=1)
    shapes = [(4096, 6144), (4096, 4096), (4096, 2 * 11008), (4096, 11008)]
    least = 32 * sum(5 * (4 * r**2 * c + 2 * r**3) for r, c in shapes) / A100.dense_flops["fp32"]
    assert least < extra < 1.5 * least
    assert muon_seconds(nnodes=1, tp=8) > 0.9 * extra


def test_data_parallel_ranks_share_what_muon_orthogonalizes():
    """A quarter on each of 4; of 128 matrices, a rank of 256 has none or one."""
    alone = muon_seconds(nnodes=1, gpus_per_node=1)
    assert muon_seconds(nnodes=1, gpus_per_node=4) == pytest.approx(alone / 4, rel=0.01)
    assert muon_seconds(nnodes=2, gpus_per_node=4, tp=2) == pytest.approx(alone / 4, rel=0.01)
    assert alone / 128 < muon_seconds(nnodes=32) < alone / 32
    experts = muon_seconds(nnodes=1, gpus_per_node=1, **MOE)
    assert muon_seconds(nnodes=1, gpus_per_node=4, ep=4, **MOE) == pytest.approx(experts / 4, rel=0.1)


def test_fp8_halves_products_keeps_bytes_and_needs_a_device_with_it():
    """Of large products the time of FP8 nears half; inputs take a byte, and copies of weights two."""
    common = {"preset": "mixtral-8x7b", "gpus_per_node": 8, "ep": 8, "expert_backend": "te", "gbsz": 8}
    kinds = {"bf16": ("none", "te"), "experts": ("hybrid", "local"), "all": ("hybrid", "te")}
    settings = {name: common | {"fp8": fp8, "impl": impl} for name, (fp8, impl) in kinds.items()}
    jobs = {name: PlannedJob.of(load_config(own, {})) for name, own in settings.items()}
    hardware, constants = load_hardware("H100-80GB"), load_constants()
    seconds = {name: time_of(job, hardware, constants.time).compute for name, job in jobs.items()}
    assert 0.5 * seconds["bf16"] < seconds["all"] < seconds["experts"] < 0.85 * seconds["bf16"]
    kept = {name: total(activations_of(job, A100).moe_parts) for name, job in jobs.items()}
    config = jobs["all"].config
    tokens, copies = config.seq_len, 2 * 3 * 4096 * 14336  # one expert of each layer
    # QKV and projection inputs of 4096 channels; per row 4096 in and 14336 after the activation
    assert kept["bf16"] - kept["all"] + copies == tokens * (2 * 4096 + 2 * (4096 + 14336))
    weights = {name: memory_of(job, hardware, constants.memory)[0].weights for name, job in jobs.items()}
    [part], [tables] = jobs["all"].parameters, tables_of_stages(config, 1)
    assert weights["all"] - weights["bf16"] == 2 * (part.dense - tables)
    assert weights["experts"] == weights["bf16"]
    with pytest.raises(ValueError, match=r"^FP8=hybrid: the device has no FP8 peak .* Fix: "):
        time_of(jobs["all"], A100, constants.time)
