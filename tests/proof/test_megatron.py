"""Our layer against megatron-core's own MoELayer: same weights, fp32, outputs and every gradient, on 1 and 2
expert ranks.

Both kinds of our layer are compared, the one that takes the place of Megatron's in its spec and the plain
one, over Megatron's `alltoall` and `allgather` dispatchers. Auxiliary losses are attached to the output in
Megatron, so their gradients are compared.

Where Megatron's definitions differ by design:
- Capacity: Megatron decides it per rank, we over a micro-batch, which is the same here, where a micro-batch
  is on one rank.
- Drops by position: Megatron takes the top k of ones and zeros, in an order that torch.topk does not define.
  Each expert keeps as many slots as here, where it is the first of the sequence.
- Token counts for the expert bias: Megatron's are of the slots that are not dropped, ours of those that were
  chosen.
- Groups with the softmax over the chosen: Megatron adds up logits for the score of a group, we scores.
- `global_aux_loss`: Megatron's fractions are those of the global batch so far, ours of the last complete one,
  and of the micro-batch as long as there is none. They are the same in a first global batch of a micro-batch,
  and in a second one that repeats the first. Megatron divides by the number of data parallel ranks twice, in
  the loss and with the gradients, so its coefficient has to be as many times larger.
"""

import functools

import pytest
import torch

from helpers.layers import megatron_pair
from helpers.layers.megatron_pair import EXPERTS, SHARED_FFN, Comparison, Pair, balancing, losses
from helpers.ranks import RankError, run_on_ranks
from moe_exp.layers.activations import quick_gelu
from moe_exp.layers.experts import squared_relu
from moe_exp.layers.microbatch import keep_within_capacity

LIMIT = 1e-5
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
OUR_SIGMOID = {"score": "sigmoid", "expert_bias": True}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
OUR_GROUPS = {"num_groups": 4, "group_topk": 2, "topk": 4}
THREE = {"aux_loss": 0.3, "seq_aux_loss": 0.2, "global_aux_loss": 0.1}


AUX, OUR_AUX = balancing(aux_loss=0.3), losses(aux_loss=0.3)
SEQ, OUR_SEQ = balancing(seq_aux_loss=0.3), losses(seq_aux_loss=0.3)
GLOBAL, OUR_GLOBAL = balancing(global_aux_loss=0.3), losses(global_aux_loss=0.3)
FRACTIONS = {"global_fractions": True}
CHOSEN, OUR_CHOSEN = {"moe_router_pre_softmax": False}, {"pre_softmax": False}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1}
OUR_SINKHORN = {"assignment": "sinkhorn", "topk": 1}
SCALED, OUR_SCALED = {"moe_router_topk_scaling_factor": 2.5}, {"scaling_factor": 2.5}
FP64, OUR_FP64 = {"moe_router_dtype": "fp64"}, {"dtype": "fp64"}
Z_LOSS, OUR_Z_LOSS = {"moe_z_loss_coeff": 0.1}, {"z_loss_coeff": 0.1}
BIASES = {"add_bias_linear": True}
SHARED = {"moe_shared_expert_intermediate_size": SHARED_FFN}
DROPS, OUR_DROPS = {"moe_expert_capacity_factor": 0.7}, {"capacity_factor": 0.7}
NOT_GATED = {"gated_linear_unit": False}
CLAMPED = {"activation_func": quick_gelu, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}


def capacity(factor: float, policy: str, *, pad: bool) -> Pair:
    megatron = {"moe_expert_capacity_factor": factor, "moe_token_drop_policy": policy}
    megatron["moe_pad_expert_input_to_capacity"] = pad
    ours = {"capacity_factor": factor, "drop_policy": policy, "pad_to_capacity": pad}
    return Pair(megatron, settings=ours, dispatchers=("alltoall",))


PAIRS = {
    "softmax over all": Pair(),
    "softmax over the chosen": Pair(CHOSEN, OUR_CHOSEN),
    "one expert": Pair({"moe_router_topk": 1}, {"topk": 1}),
    "every expert": Pair({"moe_router_topk": EXPERTS}, {"topk": EXPERTS}),
    "scaling factor": Pair(SCALED, OUR_SCALED),
    "fp64 router": Pair(FP64, OUR_FP64),
    "sigmoid": Pair({"moe_router_score_function": "sigmoid"}, {"score": "sigmoid"}),
    "sigmoid, one expert": Pair(
        {"moe_router_score_function": "sigmoid", "moe_router_topk": 1}, {"score": "sigmoid", "topk": 1}
    ),
    "sigmoid with expert bias": Pair(SIGMOID, OUR_SIGMOID),
    "groups": Pair(GROUPS, OUR_GROUPS),
    "groups, sigmoid with expert bias": Pair(
        GROUPS | SIGMOID | SCALED, OUR_GROUPS | OUR_SIGMOID | OUR_SCALED
    ),
    "biases": Pair(BIASES | AUX, {"bias": True}, OUR_AUX),
    "biases, softmax over the chosen": Pair(BIASES | CHOSEN, {"bias": True, **OUR_CHOSEN}),
    "biases, sigmoid with expert bias, fp64 router": Pair(
        BIASES | Z_LOSS | FP64 | SIGMOID, {"bias": True} | OUR_FP64 | OUR_SIGMOID, OUR_Z_LOSS
    ),
    "biases, sinkhorn": Pair(BIASES | SINKHORN, {"bias": True, **OUR_SINKHORN}),
    "sinkhorn": Pair(SINKHORN, OUR_SINKHORN),
    "aux_loss": Pair(AUX, settings=OUR_AUX),
    "aux_loss, softmax over the chosen": Pair(AUX | CHOSEN, OUR_CHOSEN, OUR_AUX),
    "aux_loss, sigmoid with expert bias": Pair(AUX | SIGMOID, OUR_SIGMOID, OUR_AUX),
    "aux_loss, groups": Pair(AUX | GROUPS, OUR_GROUPS, OUR_AUX),
    "seq_aux_loss": Pair(SEQ, settings=OUR_SEQ),
    "seq_aux_loss, sigmoid with expert bias": Pair(SEQ | SIGMOID, OUR_SIGMOID, OUR_SEQ),
    "z-loss": Pair(Z_LOSS, settings=OUR_Z_LOSS),
    "global_aux_loss, first batch": Pair(GLOBAL, FRACTIONS, OUR_GLOBAL, only_ep=1),
    "global_aux_loss, second batch": Pair(GLOBAL, FRACTIONS, OUR_GLOBAL, passes=1, only_ep=1),
    "global_aux_loss, two data ranks": Pair(
        balancing(global_aux_loss=0.6), FRACTIONS, OUR_GLOBAL, GLOBAL, passes=1, only_ep=2
    ),
    "three losses and the z-loss": Pair(
        balancing(**THREE) | Z_LOSS, FRACTIONS, losses(**THREE) | OUR_Z_LOSS, only_ep=1
    ),
    "capacity": capacity(0.7, "probs", pad=False),
    "capacity and pad": capacity(0.7, "probs", pad=True),
    "capacity and aux_loss": Pair(AUX | DROPS, settings=OUR_AUX | OUR_DROPS, dispatchers=("alltoall",)),
    "large capacity by position": capacity(4.0, "position", pad=False),
    "large capacity and pad": capacity(4.0, "probs", pad=True),
    "shared expert": Pair(SHARED, shared=False),
    "gated shared expert": Pair(SHARED | {"moe_shared_expert_gate": True}, shared=True),
    "latent experts": Pair({"moe_latent_size": 9}, latent=9),
    "latent experts, shared expert, capacity, losses": Pair(
        AUX | SHARED | DROPS | {"moe_latent_size": 9}, settings=OUR_AUX | OUR_DROPS, shared=False, latent=9,
        dispatchers=("alltoall",),
    ),
    "GeGLU": Pair({"activation_func": torch.nn.functional.gelu}, activation="geglu"),
    "clamped SwiGLU": Pair(CLAMPED, activation="clamped_swiglu"),
    "GELU": Pair(NOT_GATED | {"activation_func": torch.nn.functional.gelu}, activation="gelu"),
    "squared ReLU": Pair(NOT_GATED | {"activation_func": squared_relu}, activation="squared_relu"),
}  # fmt: skip


@functools.cache
def on_ranks(ep: int) -> dict[str, list[Comparison]] | RankError:
    """Of every pair for this size, what each rank found; or how the job failed, which is to be seen once."""
    pairs = {name: pair for name, pair in PAIRS.items() if pair.only_ep in (None, ep)}
    try:
        ranks = run_on_ranks(ep, megatron_pair.compare_on_rank, ep, pairs, timeout=300)
    except RankError as error:
        return error
    return {name: [rank[name] for rank in ranks] for name in pairs}


CASES = [(name, ep) for name, pair in PAIRS.items() for ep in (1, 2) if pair.only_ep in (None, ep)]


@pytest.mark.parametrize(
    ("name", "ep"),
    [
        pytest.param(name, ep, id=f"{name}, EP={ep}", marks=[pytest.mark.slow] * (ep == 2))
        for name, ep in CASES
    ],
)
def test_layer(name, ep):
    found = on_ranks(ep)
    if isinstance(found, RankError):
        raise found
    pair, ranks = PAIRS[name], found[name]
    assert len(ranks) == ep
    largest = 0.0
    for rank, comparison in enumerate(ranks):
        assert len(comparison.errors) == 2 * len(pair.dispatchers)
        for kind, errors in comparison.errors.items():
            assert ("router bias" in errors) == pair.router.get("bias", False)
            wrong = {tensor: error for tensor, error in errors.items() if not error < LIMIT}
            assert not wrong, f"rank {rank}, {kind}: relative errors not below {LIMIT:g}: {wrong}"
            assert {"y", "x", "router", "weight1", "weight2"} <= errors.keys()
            largest = max(largest, *errors.values())
        # Capacity and losses have something to do in the batch that is compared.
        if pair.settings and "large" not in name:
            assert comparison.effect > 1e-3
    print(f"largest relative error {largest:.1e}")


@pytest.mark.parametrize("capacity", [1, 7, 20])
def test_drops_by_position_are_as_many(capacity):
    expert_TK = torch.rand(36, EXPERTS, generator=torch.Generator().manual_seed(0)).topk(2).indices
    routing_map = torch.zeros(36, EXPERTS, dtype=torch.bool).scatter(1, expert_TK, True)
    rule = {"capacity_factor": capacity * EXPERTS / 72, "drop_policy": "position"}
    drop = megatron_pair.apply_router_token_dropping
    _, theirs = drop(routing_map.float(), routing_map, router_topk=2, **rule)
    kept_TK = keep_within_capacity(expert_TK, None, num_experts=EXPERTS, capacity=capacity)
    ours = torch.zeros(36, EXPERTS, dtype=torch.bool).scatter(1, expert_TK, kept_TK)
    assert ours.sum(dim=0).tolist() == theirs.sum(dim=0).tolist()
    assert (ours.sum() < routing_map.sum()) == (capacity < 20)
    if capacity == 20:
        assert torch.equal(ours, theirs)
