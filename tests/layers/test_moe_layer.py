import copy
import math

import pytest
import torch
import torch.distributed as dist

from helpers.layers.references import formula, kept_by_loop
from helpers.layers.tiny_moe import (
    EXPERTS,
    HIDDEN,
    MODES,
    TOKENS,
    plain_layer,
    projection,
    pushed_tokens,
    random,
    tiny_layer,
)
from helpers.ranks import run_on_ranks
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import RouterConfig


def naive(layer: MoELayer, x_TD: torch.Tensor, topk: int):
    """y_t = up(sum_k w_tk expert_k(down(x_t))) + shared(x_t) and the losses, one token and one expert at a
    time, by leaves of its own.
    """
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (x_TD, *weights_of(layer))]
    x_TD, router, weight1, weight2, shared, *projections = leaves
    down, up = projections or (torch.eye(HIDDEN, dtype=x_TD.dtype),) * 2
    probabilities = [torch.exp(router @ x) / torch.exp(router @ x).sum() for x in x_TD]
    experts = [sorted(range(EXPERTS), key=lambda e, p=p: -p[e].item())[:topk] for p in probabilities]
    kept = [[True] * topk for _ in experts]
    if layer.settings.capacity_factor is not None:
        capacity = math.ceil(layer.settings.capacity_factor * len(x_TD) * topk / EXPERTS)
        weights = [[p[e].item() for e in row] for p, row in zip(probabilities, experts, strict=True)]
        kept = kept_by_loop(experts, weights, capacity)
    outs = []
    for t, x in enumerate(x_TD):
        out = torch.zeros_like(down @ x)
        for k, e in enumerate(experts[t]):
            if kept[t][k]:
                out = out + probabilities[t][e] * (weight2[e] @ formula("swiglu", weight1[e] @ (down @ x)))
        outs.append(up @ out + shared @ x)
    fractions = [sum(e in row for row in experts) / (len(experts) * topk) for e in range(EXPERTS)]
    fractions = torch.tensor(fractions, dtype=torch.float64)
    balance = EXPERTS * (fractions * torch.stack(probabilities).mean(dim=0)).sum()
    z = torch.stack([torch.log(torch.exp(router @ x).sum()) ** 2 for x in x_TD]).mean()
    return torch.stack(outs), balance, z, leaves, kept


def weights_of(layer: MoELayer) -> list[torch.Tensor]:
    linears = [layer.shared] if layer.down is None else [layer.shared, layer.down, layer.up]
    experts = layer.experts.weight1, layer.experts.weight2
    return [layer.router.weight, *experts, *(linear.weight for linear in linears)]


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("mode", [*MODES, "padded, nothing dropped"])
@pytest.mark.parametrize("alltoall", [False, True])
@pytest.mark.parametrize("latent", [0, 3])
def test_layer_against_a_loop_over_tokens(mode, topk, alltoall, latent):
    modes = MODES | {"padded, nothing dropped": {"capacity_factor": 4.0, "pad_to_capacity": True}}
    options = {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2, "shared": projection(HIDDEN, HIDDEN, seed=8)}
    layer = tiny_layer(topk=topk, alltoall=alltoall, latent=latent, **options, **modes[mode])
    x_TD, grad_TD = pushed_tokens(TOKENS).requires_grad_(), random(len(TOKENS), HIDDEN, seed=4)
    expected_TD, balance, z, leaves, kept = naive(layer, x_TD, topk)
    expected_loss = 0.3 * balance + 0.2 * z
    ((expected_TD * grad_TD).sum() + expected_loss).backward()
    y_TD, loss = layer(x_TD)
    ((y_TD * grad_TD).sum() + loss).backward()

    if mode in ("capacity", "padded"):
        assert not all(map(all, kept))
    torch.testing.assert_close(y_TD, expected_TD, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for tensor, leaf in zip((x_TD, *weights_of(layer)), leaves, strict=True):
        torch.testing.assert_close(tensor.grad, leaf.grad, rtol=1e-11, atol=1e-12)

    statistics = layer.statistics
    torch.testing.assert_close(statistics.sums[4:6], torch.stack([balance, z]).detach(), rtol=1e-12, atol=0)
    assert statistics.sums[0] == sum(not slot for row in kept for slot in row)


def test_one_latent_projection_alone_is_refused():
    layer = tiny_layer()
    parts = {"router": layer.router, "dispatcher": layer.dispatcher, "experts": layer.experts}
    with pytest.raises(ValueError, match=r"^down, up: .* Fix: pass both projections, or"):
        MoELayer(**parts, settings=MoESettings(), up=projection(HIDDEN, HIDDEN, seed=1))


def test_without_coefficients_there_is_no_loss():
    assert tiny_layer()(pushed_tokens(TOKENS))[1] is None


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_capacity_equals_dropless_to_the_bit(pad, dtype):
    results = []
    for settings in ({}, {"capacity_factor": 2.0, "pad_to_capacity": pad}):
        torch.manual_seed(1)
        layer = plain_layer(RouterConfig(4, 4, topk=2), ffn_size=8, **settings)
        layer.experts.to(dtype)
        x_TD = random(33, 4, seed=3).to(dtype).requires_grad_()
        y_TD, _ = layer(x_TD)
        assert y_TD.dtype == dtype
        y_TD.backward(random(33, 4, seed=4).to(dtype))
        results.append([y_TD, x_TD.grad, layer.router.weight.grad])
    for dropless, capacity in zip(*results, strict=True):
        assert torch.equal(dropless, capacity)


# Statistics


def test_statistics_by_hand():
    layer = plain_layer(RouterConfig(2, 2, topk=1), ffn_size=2, capacity_factor=1.0)
    layer.router.weight.data.copy_(torch.eye(2))
    # Probabilities 3/4 and 1/4, four times for expert 0 and once for expert 1; an expert takes ceil(5/2) = 3.
    x_TD = torch.tensor([[math.log(3.0), 0.0]] * 4 + [[0.0, math.log(3.0)]])
    layer(x_TD)
    layer(x_TD)
    assert layer.statistics.tokens_per_expert_E.tolist() == [8, 2]
    assert layer.statistics.num_microbatches == 2
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    # Mean scores: .65 and .35, fractions .8 and .2: 2 * (.52 + .07); both logsumexp are ln 4.
    # The busiest expert has 4 of 5 slots, 1.6 times its share.
    expected = [2 * 1, 2 * 5 * entropy, 2 * 5 * 0.75, 2 * 1.6, 2 * 1.18, 2 * math.log(4) ** 2, 2 * 5]
    assert layer.statistics.sums.tolist() == pytest.approx(expected, rel=1e-6)
    layer.statistics.reset()
    assert layer.statistics.tokens_per_expert_E.tolist() == [0, 0]
    assert layer.statistics.sums.tolist() == [0] * 7
    assert layer.statistics.num_microbatches == 0


def test_entropy_of_a_sure_router_is_zero_and_not_nan():
    layer = tiny_layer()
    layer(pushed_tokens(TOKENS, strength=1e5))
    assert layer.statistics.sums[1] == 0


def test_evaluation_is_not_counted():
    layer = tiny_layer(aux_loss_coeff=0.1)
    layer.eval()(pushed_tokens(TOKENS))
    with torch.no_grad():
        layer.train()(pushed_tokens(TOKENS))
    assert layer.statistics.num_microbatches == 0
    assert not layer.statistics.tokens_per_expert_E.any()
    assert not layer.statistics.sums.any()


# As a part of a torch-native model


def test_the_layer_is_made_on_the_meta_device_and_drawn_where_it_goes():
    with torch.device("meta"):
        layer = fresh_layer()
    assert all(parameter.is_meta for parameter in layer.parameters()) and layer.statistics.sums.is_meta
    layer.to_empty(device="cpu")
    for buffer in layer.buffers():
        buffer.fill_(7)  # what is in memory
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not layer.router.expert_bias.any() and not layer.router.local_tokens_per_expert.any()
    y_TD, _ = layer(random(5, HIDDEN, seed=1).float())
    assert y_TD.isfinite().all() and y_TD.abs().max() > 0
    assert layer.statistics.tokens_per_expert_E.sum() == 10


def fresh_layer() -> MoELayer:
    return plain_layer(RouterConfig(HIDDEN, 4, topk=2, expert_bias=True), ffn_size=4, bias=True)


def test_statistics_keep_their_dtype_in_a_bf16_model():
    layer = fresh_layer().bfloat16()
    layer(random(5, HIDDEN, seed=1).bfloat16())
    assert layer.statistics.sums.dtype == torch.float64
    assert layer.router.expert_bias.dtype == torch.float32


def test_initial_weights():
    layer = fresh_layer()
    for name, parameter in layer.named_parameters():
        assert (not parameter.any()) if "bias" in name else (0.005 < parameter.std() < 0.05), name


def test_autocast_does_not_round_the_router():
    layer = fresh_layer()
    x_TD = random(9, HIDDEN, seed=2).float()
    plain = layer.route(x_TD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = layer.route(x_TD)
    for name in ("logits_TE", "scores_TE", "weights_TK", "expert_TK"):
        assert torch.equal(getattr(cast, name), getattr(plain, name)), name


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_drops_are_the_same_whichever_dimension_counts_sequences(policy):
    x_BSD = random(3, 10, HIDDEN, seed=8)
    layers = [tiny_layer(batch_dim=dim, capacity_factor=0.6, drop_policy=policy) for dim in (0, 1)]
    batch_first, sequence_first = layers[0](x_BSD)[0], layers[1](x_BSD.transpose(0, 1))[0].transpose(0, 1)
    torch.testing.assert_close(batch_first, sequence_first, rtol=1e-12, atol=0)
    assert layers[0].statistics.sums[0] > 0


def part_of_the_sequence(settings):
    group = dist.group.WORLD
    layer = tiny_layer(**settings, microbatch_group=group)
    return layer(random(3, 12, HIDDEN, seed=8).chunk(group.size(), dim=1)[group.rank()])[0].detach()


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [
        ({"capacity_factor": 0.6, "drop_policy": "probs"}, 2),
        ({"capacity_factor": 0.6, "drop_policy": "position"}, 2),
        ({"token_rounding": 8}, 2),
        ({"token_rounding": 8}, 4),
    ],
)
def test_drops_of_batch_first_tokens_do_not_depend_on_the_ranks(settings, num_ranks):
    layer = tiny_layer(**settings)
    whole, _ = layer(random(3, 12, HIDDEN, seed=8))
    assert layer.statistics.sums[0] > 0
    parts = run_on_ranks(num_ranks, part_of_the_sequence, settings)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-12, atol=0)


def test_rounding_is_for_training_alone_and_counts_as_drops():
    layer = tiny_layer(token_rounding=8)
    x_TD = random(41, HIDDEN, seed=8)
    decision = layer.route(x_TD)
    kept_E = torch.bincount(decision.expert_TK[decision.kept_TK], minlength=4)
    assert ((kept_E % 8 == 0) | (decision.tokens_per_expert_E < 8)).all() and kept_E.sum() < 82
    layer(x_TD)
    assert layer.statistics.sums[0] == 82 - kept_E.sum()
    torch.testing.assert_close(layer.eval()(x_TD)[0], tiny_layer()(x_TD)[0], rtol=0, atol=0)


@pytest.mark.parametrize("alltoall", [False, True])
@pytest.mark.parametrize("backend", ["loop", "triton"])
def test_a_hook_may_bring_the_weights_of_the_experts(backend, alltoall):
    """As Megatron's overlapped gather of parameters and FSDP2 do, by a hook of the module that has them."""
    layer = tiny_layer(backend=backend, alltoall=alltoall, dtype=torch.float32)
    x_TD = random(12, HIDDEN, seed=1).float()
    expected, _ = layer(x_TD)
    weights = copy.deepcopy(layer.experts.state_dict())
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.fill_(math.nan)

    def gather(experts: torch.nn.Module, _: tuple[object, ...]) -> None:
        experts.load_state_dict(weights)

    layer.experts.register_forward_pre_hook(gather)
    assert torch.equal(layer(x_TD)[0], expected)
