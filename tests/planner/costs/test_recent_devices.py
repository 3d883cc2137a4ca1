"""What is counted on devices newer than Ampere: exchange by dispatcher, the host, overlap, FSDP."""

from dataclasses import replace

import pytest

from moe_exp.config import load_config
from moe_exp.planner.costs.constants import RECENT, TimeConstants
from moe_exp.planner.costs.device import Device, Group, exchange_seconds
from moe_exp.planner.costs.job import Engine, PlannedJob
from moe_exp.planner.costs.layer_time import layer_times
from moe_exp.planner.costs.memory import memory_of
from moe_exp.planner.costs.timing import time_of
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.prediction import load_constants, predict

# Microseconds of dispatch and of combine: 4096 tokens of 7168 channels, 256 experts, TOPK=8
# (arXiv:2603.07685, table 7): HybridEP, and NCCL's all-to-all.
MEASURED = {
    "GB200": {8: (391, 353, 735, 741), 16: (578, 527, 743, 765), 32: (612, 646, 769, 758),
              64: (675, 744, 930, 827)},
    "H100": {8: (661, 624, 1265, 1277), 16: (1485, 1688, 5774, 5628), 32: (3064, 3088, 8059, 7815),
             64: (4626, 4398, 9164, 8727)},
}  # fmt: skip
GPT = {"preset": "qwen3-30b-a3b", "nnodes": 2, "gpus_per_node": 8, "ep": 8, "gbsz": 64, "mbsz": 1}
CONSTANTS = load_constants().time


def job(engine=Engine(), **settings):  # noqa: B008
    return replace(PlannedJob.of(load_config(GPT | settings, {})), engine=engine)


def seconds(of, device="H100"):
    return time_of(of, load_hardware(device), CONSTANTS)


def layers(of, device="H100"):
    """Times of its layers."""
    return layer_times(of, Device(load_hardware(device), "bf16", CONSTANTS))


def with_and_without(**engine):
    """Jobs of programs that differ in this."""
    return job(), job(Engine(**engine))


@pytest.mark.parametrize(("device", "ep"), [(device, ep) for device, of in MEASURED.items() for ep in of])
def test_exchanges_that_were_measured(device, ep):
    """With the priors, whose source they are."""
    hardware, nodes = load_hardware(device), 64 // load_hardware(device).gpus_per_node
    model = {
        "num_experts": 256, "topk": 8, "hidden_size": 7168, "num_heads": 64, "seq_len": 4096, "mbsz": 1,
        "dtype": "bf16",
    }  # fmt: skip
    layout = {"nnodes": nodes, "gpus_per_node": hardware.gpus_per_node, "ep": ep}
    if ep == 64 and device == "H100":  # tokens go to 4 of the 8 groups of experts, each group is a node
        layout |= {"num_router_groups": 8, "router_group_topk": 4}
    all_to_all = PlannedJob.of(load_config(model | layout | {"use_moe": True}, {}))
    hybrid = replace(all_to_all, engine=Engine(dispatcher="hybridep"))
    *of_hybrid, dispatch, combine = MEASURED[device][ep]
    for of, measured in ((hybrid, of_hybrid), (all_to_all, (dispatch, combine))):
        predicted = exchange_seconds(of, hardware, TimeConstants())
        assert predicted == pytest.approx(sum(measured) / 2e6, rel=0.2)


def test_a_rack_of_72_is_one_domain():
    devices = map(load_hardware, ("GB200", "B200"))
    within, across = (exchange_seconds(job(ep=16), device, TimeConstants()) for device in devices)
    assert across > 5 * within


def test_cuda_graphs_take_the_host_out():
    plain = seconds(job())
    attention = seconds(job(Engine(graphs=frozenset({"attn", "moe_router"}))))
    everything = seconds(job(Engine(graphs=frozenset({"all"}))))
    assert plain.host > 1.2 * attention.host > 2 * everything.host > 0
    assert plain.compute == attention.compute == everything.compute


def test_small_micro_batches_are_bound_by_the_host():
    small, large = (seconds(job(mbsz=mbsz)) for mbsz in (1, 8))
    assert small.host / small.total > 0.1 > 0.07 > large.host / large.total


def test_products_in_fp8_start_more_kernels():
    """Twice the seconds of the host, but for those of router and exchange: 1 local expert."""
    one = {"impl": "te", "ep": 8, "num_experts": 8, "topk": 2}
    bf16, fp8 = (layers(job(**one, fp8=fp8)).host[True] for fp8 in ("none", "hybrid"))
    extra = 0.7 * CONSTANTS.host_dense + CONSTANTS.host_expert
    assert fp8 - bf16 == pytest.approx((CONSTANTS.host_fp8 - 1) * extra)


def test_fsdp_takes_the_host_time_for_each_weight():
    """6 weights, and two of each of 16 local experts."""
    plain, sharded = (layers(of, "B200") for of in with_and_without(shards_parameters=True))
    assert sharded.host[False] - plain.host[False] == pytest.approx(6 * CONSTANTS.host_sharded)
    assert sharded.host[True] - plain.host[True] == pytest.approx((6 + 2 * 16) * CONSTANTS.host_sharded)


def test_overlap_hides_most_of_the_exchange_and_takes_host_time():
    jobs = with_and_without(overlaps_exchange=True)
    plain, hidden = map(seconds, jobs)
    assert hidden.expert_parallel == pytest.approx(CONSTANTS.exchange_exposed * plain.expert_parallel)
    plain, overlapped = map(layers, jobs)
    assert overlapped.host[True] == pytest.approx(CONSTANTS.host_overlap * plain.host[True])
    assert overlapped.host[False] == plain.host[False]


def test_exponentials_of_attention():
    """32 heads of 4096 queries and keys, half of them masked; Blackwell Ultra has 2.14 times the units."""
    b200, b300 = (layers(job(), gpu).parts["core"] for gpu in ("B200", "B300"))
    slower = 0.5 * 32 * 4096 * 4096 * CONSTANTS.exponentials * (1 / 5e12 - 1 / 10.7e12)
    assert b200.forward - b300.forward == pytest.approx(slower)
    assert b200.backward - b300.backward == pytest.approx(slower)


def test_scaling_by_tensor_reads_it_once_more():
    tensorwise, mxfp8 = (
        layers(job(impl="te", fp8="e4m3", fp8_recipe=recipe), "B200").parts["projections"].forward
        for recipe in ("tensorwise", "mxfp8")
    )
    # input and weights of [2048 -> 5120] and [4096 -> 2048], 4096 tokens
    elements = 4096 * (2048 + 4096) + 2048 * (5120 + 4096)
    bandwidth = load_hardware("B200").memory_bytes_per_second
    bandwidth *= CONSTANTS.recent_memory * CONSTANTS.blackwell_memory
    assert tensorwise - mxfp8 == pytest.approx(2 * elements * CONSTANTS.cast_bytes / bandwidth)


def test_balanced_tokens_are_faster_than_the_router_s():
    free, balanced = map(seconds, with_and_without(balanced=True))
    assert free.expert_parallel == pytest.approx(balanced.expert_parallel * CONSTANTS.skew)
    # one rank has all experts
    free, balanced = (seconds(job(Engine(balanced=balanced), ep=1)) for balanced in (False, True))
    assert free == balanced and free.expert_parallel == 0


def test_rings_over_the_network_reach_their_share_of_it():
    group = Group(4, 8, load_hardware("H100"), 8)
    reached = group.bytes_per_second * group.ring_share(CONSTANTS, 0.0)
    assert reached == pytest.approx(CONSTANTS.network_ring * 50e9)


def test_fp8_and_nvfp4_by_their_peaks():
    large = {"preset": "mixtral-8x7b", "impl": "te"}
    bf16, fp8 = (seconds(job(**large, fp8=fp8), "GB200").compute for fp8 in ("none", "e4m3"))
    nvfp4 = seconds(job(Engine(is_nvfp4=True), **large, fp8="e4m3"), "GB200").compute
    assert bf16 > 1.3 * fp8 > 1.3 * nvfp4


def test_fsdp_shards_weights_and_gradients():
    jobs, b200 = with_and_without(shards_parameters=True), load_hardware("B200")
    [plain], [sharded] = (memory_of(of, b200, load_constants().memory) for of in jobs)
    assert sharded.weights < 0.62 * plain.weights and sharded.optimizer == plain.optimizer


def test_recomputed_modules_keep_less_and_take_longer():
    constants = load_constants().memory
    plain, repeated = with_and_without(recompute=frozenset({"layernorm", "core_attn"}))
    kept = [memory_of(of, load_hardware("H100"), constants)[0].activations for of in (plain, repeated)]
    assert kept[1] < 0.95 * kept[0] and seconds(repeated).compute > 1.01 * seconds(plain).compute


def test_published_errors_are_those_of_the_kind():
    errors = {gpu: predict(job(), load_hardware(gpu)).published for gpu in ("H100", "MI300X", "A100")}
    assert errors["MI300X"] is errors["A100"] is None
    assert errors["H100"] == load_constants().published["MoE within NVLink, bf16"]
    assert errors["H100"].rows == 50
    across = predict(job(ep=16, fp8="hybrid", impl="te"), load_hardware("H100")).published
    assert across.kind == "MoE across nodes, FP8" and across.mean_error > errors["H100"].mean_error


def test_older_devices_depend_on_no_constant_of_recent_ones():
    of, a100 = job(), load_hardware("A100")
    moved = replace(CONSTANTS, **{name: 2 * getattr(CONSTANTS, name) for name in RECENT})
    assert time_of(of, a100, moved) == time_of(of, a100, CONSTANTS)
