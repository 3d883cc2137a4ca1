import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.layers.tiny_moe import HIDDEN, random, tiny_layer
from moe_exp.layers.router.replay import record_routing, replay_routing


class Two(nn.Module):
    def __init__(self, use_reentrant: bool | None = None):
        super().__init__()
        self.first, self.second, self.use_reentrant = tiny_layer(), tiny_layer(), use_reentrant

    def forward(self, x_TD):
        for layer in (self.first, self.second):
            reentrant = self.use_reentrant
            found = layer(x_TD) if reentrant is None else checkpoint(layer, x_TD, use_reentrant=reentrant)
            x_TD = x_TD + found[0]
        return x_TD


def tokens(seed):
    return random(7, HIDDEN, seed=seed).requires_grad_()


def experts_of(model, x_TD):
    with record_routing(model) as record:
        model(x_TD)
    return {name: decisions[0] for name, decisions in record.items()}


def test_record_has_every_pass_of_every_router():
    model = Two()
    with record_routing(model) as record:
        model(tokens(1))
        model(tokens(2))
    assert set(record) == {"first.router", "second.router"}
    assert [decision.shape for decision in record["first.router"]] == [(7, 2), (7, 2)]
    assert torch.equal(record["first.router"][0], model.first.router(tokens(1)).expert_TK)
    model(tokens(3))
    assert len(record["first.router"]) == 2


def test_replay_takes_the_experts_of_another_model_and_own_weights():
    model, other = Two(), Two()
    nn.init.normal_(other.first.router.weight)
    x_TD = tokens(1)
    recorded = experts_of(other, x_TD)
    own = model.first.router(x_TD)
    assert not torch.equal(own.expert_TK, recorded["first.router"])
    with replay_routing(model, {name: [decision] for name, decision in recorded.items()}):
        decision = model.first.router(x_TD)
    assert torch.equal(decision.expert_TK, recorded["first.router"])
    torch.testing.assert_close(decision.weights_TK, own.scores_TE.gather(1, decision.expert_TK))
    assert torch.equal(model.first.router(x_TD).expert_TK, own.expert_TK)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_replay_under_recompute_is_replay(use_reentrant):
    recorded = [experts_of(Two(), tokens(seed)) for seed in (1, 2)]
    swapped = {name: [recorded[1][name], recorded[0][name]] for name in recorded[0]}
    gradients = []
    for model in (Two(), Two(use_reentrant)):
        inputs = [tokens(1), tokens(2)]
        with replay_routing(model, swapped):
            outputs = [model(x_TD) for x_TD in inputs]
            for y_TD in outputs:
                y_TD.square().sum().backward()
        gradients.append([leaf.grad for leaf in (*inputs, *model.parameters())])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-12, atol=1e-14)


def test_errors():
    model = Two()
    text = r"routing replay=first\.router: .* Fix: record the decisions "
    with pytest.raises(ValueError, match=text), replay_routing(model, {}):
        pytest.fail("replays nothing")
    recorded = {name: [decision] for name, decision in experts_of(model, tokens(1)).items()}
    with replay_routing(model, recorded):
        model(tokens(1))
        with pytest.raises(ValueError, match=r"routing replay=2 passes: the recording ends after pass 1"):
            model(tokens(1))
    with replay_routing(model, recorded), pytest.raises(ValueError, match=r"\(5, 2\): .* shape \(7, 2\)"):
        model(tokens(1)[:5])
    assert model.first.router.replay is None
