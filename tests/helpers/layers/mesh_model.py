"""A small torch-native MoE language model, as somebody without Megatron would write it around our layer; for
test_mesh.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from moe_exp.layers.dispatcher import AllToAllDispatcher, LocalDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.mesh import TensorParallelDispatcher, expert_width_part
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig

VOCAB, HIDDEN, HEADS, FFN, EXPERTS, TOPK, LAYERS = 64, 32, 4, 48, 4, 2, 2
AUX, Z = 0.05, 0.01


@dataclass(frozen=True)
class Meshes:
    """The same ranks seen by attention and by the experts.

    Args:
        dense: dimensions `dp`, `shard`, `tp`.
        experts: `dp`, `shard`, `ep`, `tp`; the experts are spread over `ep` and sharded over the `shard` that
            is left.
    """

    dense: DeviceMesh
    experts: DeviceMesh


class Attention(nn.Module):
    """Causal self-attention; with tensor parallelism each rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def moe_layer(meshes: Meshes | None) -> MoELayer:
    """All experts on this rank; or with tensor parallelism a part of each, or with expert parallelism some of
    them.
    """
    tp, ep = (1, 1) if meshes is None else (meshes.dense["tp"].size(), meshes.experts["ep"].size())
    dispatcher = LocalDispatcher(EXPERTS)
    if tp > 1:
        dispatcher = TensorParallelDispatcher(EXPERTS, tp_mesh=meshes.dense["tp"])
    if ep > 1:
        dispatcher = AllToAllDispatcher(EXPERTS, ep_group=meshes.experts["ep"].get_group(), etp_group=None)
    sizes = {"num_local_experts": EXPERTS // ep, "hidden_size": HIDDEN, "ffn_size": FFN // tp}
    return MoELayer(
        router=Router(RouterConfig(hidden_size=HIDDEN, num_experts=EXPERTS, topk=TOPK)),
        dispatcher=dispatcher,
        experts=Experts(**sizes, activation="swiglu", backend="loop"),
        settings=MoESettings(losses=(AuxLoss("aux_loss", AUX),), z_loss_coeff=Z),
    )


class Block(nn.Module):
    """Attention, then experts."""

    def __init__(self, meshes: Meshes | None) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.moe = moe_layer(meshes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, loss = self.moe(self.moe_norm(x))
        return x + y, loss


class Model(nn.Module):
    """Tokens [B, S] to logits [B, S, VOCAB], and the sum of the layers' auxiliary losses."""

    def __init__(self, meshes: Meshes | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(meshes) for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, losses = self.embedding(tokens), []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        return self.output(self.norm(x)), torch.stack(losses).sum()


def initial_weights() -> dict[str, Tensor]:
    """Weights of the whole model, the same on every rank; normal, of unit gain, and norms near one."""
    weights = {}
    for seed, (name, weight) in enumerate(Model().state_dict().items()):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        weights[name] = 1 + 0.1 * noise if "norm" in name else noise * weight.size(-1) ** -0.5
    return weights


def part_of_rank(name: str, weight: Tensor, meshes: Meshes) -> Tensor:
    """What a rank holds before sharding: some of the experts, a part of each expert's width, and all of
    everything else.
    """
    if ".experts." not in name:
        return weight
    ep_mesh = meshes.experts["ep"]
    weight = weight.chunk(ep_mesh.size())[ep_mesh.get_local_rank()]
    axis, num_halves = (1, 2) if name.endswith("weight1") else (2, 1)
    return expert_width_part(weight, axis=axis, num_halves=num_halves, tp_mesh=meshes.dense["tp"])


def whole_model(weights: dict[str, Tensor], device: torch.device) -> Model:
    """The model on one rank."""
    model = Model()
    model.load_state_dict(weights)
    return model.to(device)


def parallel_model(weights: dict[str, Tensor], meshes: Meshes) -> Model:
    """The model under tensor or expert parallelism and HSDP: sharded over `shard`, replicated over `dp`."""
    model = Model(meshes)
    model.load_state_dict({name: part_of_rank(name, weight, meshes) for name, weight in weights.items()})
    model.to(meshes.dense.device_type)
    for block in model.blocks:
        if meshes.dense["tp"].size() > 1:
            plan = {name: ColwiseParallel() for name in ("query", "key", "value")}
            parallelize_module(block.attention, meshes.dense["tp"], plan | {"out": RowwiseParallel()})
        if meshes.experts["ep"].size() > 1:
            experts = fully_shard(block.moe.experts, mesh=meshes.experts["dp", "shard"])
            # FSDP takes the mean over its ranks. An expert's gradient has the tokens of all `ep` ranks in it
            # already.
            experts.set_gradient_divide_factor(meshes.dense["dp"].size() * meshes.dense["shard"].size())
            # gloo cannot scale within a reduction; and on one rank torch 2.13 would then divide twice.
            experts.set_force_sum_reduction_for_comms(meshes.experts["shard"].size() > 1)
        fully_shard(block, mesh=meshes.dense["dp", "shard"])
    fully_shard(model, mesh=meshes.dense["dp", "shard"])
    return model


def full(tensor: Tensor | None) -> Tensor:
    """A gradient or a weight without its sharding; collective."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
