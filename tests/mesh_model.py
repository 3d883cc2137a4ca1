"""A small torch-native MoE language model, as somebody without Megatron would write it around our layer; for test_mesh.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from moe_exp.layers.dispatcher import LocalDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.mesh import TensorParallelDispatcher, expert_width_part
from moe_exp.layers.moe_layer import MoELayer, MoESettings
from moe_exp.layers.router import Router, RouterConfig

VOCAB, HIDDEN, HEADS, FFN, EXPERTS, TOPK, LAYERS = 64, 32, 4, 48, 4, 2, 2
AUX, Z = 0.05, 0.01


class Attention(nn.Module):
    """Causal self-attention; with tensor parallelism each rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then experts."""

    def __init__(self, tp_mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        ranks = 1 if tp_mesh is None else tp_mesh.size()
        self.moe = MoELayer(
            router=Router(RouterConfig(hidden_size=HIDDEN, num_experts=EXPERTS, topk=TOPK)),
            dispatcher=LocalDispatcher(EXPERTS) if tp_mesh is None else TensorParallelDispatcher(EXPERTS, tp_mesh=tp_mesh),
            experts=Experts(num_local_experts=EXPERTS, hidden_size=HIDDEN, ffn_size=FFN // ranks, activation="swiglu", backend="loop"),
            settings=MoESettings(losses=(AuxLoss("aux_loss", AUX),), z_loss_coeff=Z),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, loss = self.moe(self.moe_norm(x))
        return x + y, loss


class Model(nn.Module):
    """Tokens [B, S] to logits [B, S, VOCAB], and the sum of the layers' auxiliary losses."""

    def __init__(self, tp_mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(tp_mesh) for _ in range(LAYERS))
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


def part_of_rank(name: str, weight: Tensor, tp_mesh: DeviceMesh | None) -> Tensor:
    """What a tensor parallel rank holds as a plain tensor: a part of each expert's width, all of everything else."""
    if tp_mesh is None or ".experts." not in name:
        return weight
    axis, num_halves = (1, 2) if name.endswith("weight1") else (2, 1)
    return expert_width_part(weight, axis=axis, num_halves=num_halves, tp_mesh=tp_mesh)


def whole_model(weights: dict[str, Tensor], device: torch.device) -> Model:
    """The model on one rank."""
    model = Model()
    model.load_state_dict(weights)
    return model.to(device)


def parallel_model(weights: dict[str, Tensor], mesh: DeviceMesh) -> Model:
    """The model under tensor parallelism over `tp`, and HSDP: sharded over `shard`, replicated over `dp`."""
    tp_mesh = mesh["tp"] if mesh["tp"].size() > 1 else None
    model = Model(tp_mesh)
    model.load_state_dict({name: part_of_rank(name, weight, tp_mesh) for name, weight in weights.items()})
    model.to(mesh.device_type)
    for block in model.blocks:
        if tp_mesh is not None:
            plan = {"query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(), "out": RowwiseParallel()}
            parallelize_module(block.attention, tp_mesh, plan)
        fully_shard(block, mesh=mesh["dp", "shard"])
    fully_shard(model, mesh=mesh["dp", "shard"])
    return model


def full(tensor: Tensor | None) -> Tensor:
    """A gradient or a weight without its sharding; collective."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
