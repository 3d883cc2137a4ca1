"""Trains MoE layers with FSDP2 and expert parallelism: experts over EP ranks, other weights over all ranks.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_ep.py               # under 60 seconds on two cores
    torchrun --standalone --nproc-per-node 4 examples/fsdp_ep.py --ep 2        # NCCL with GPUs, else gloo

Ranks with the same place in their expert parallel group hold the same experts, which FSDP2 shards over them.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_exp.layers.dispatcher import AllToAllDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig

HIDDEN, EXPERTS, TOPK, LAYERS, TOKENS = 64, 8, 2, 2, 512


class Layer(nn.Module):
    """x + moe(norm(x)), with EXPERTS / EP experts on this rank."""

    def __init__(self, ep_mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.moe = MoELayer(
            router=Router(RouterConfig(hidden_size=HIDDEN, num_experts=EXPERTS, topk=TOPK)),
            dispatcher=AllToAllDispatcher(EXPERTS, ep_group=ep_mesh.get_group(), etp_group=None),
            experts=Experts(
                num_local_experts=EXPERTS // ep_mesh.size(),
                hidden_size=HIDDEN,
                ffn_size=128,
                activation="swiglu",
                backend="loop",
            ),
            settings=MoESettings(losses=(AuxLoss("aux_loss", 1e-2),)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, auxiliary_loss = self.moe(self.norm(x))
        return x + y, auxiliary_loss


def sharded_layers(device: torch.device, ep: int) -> nn.ModuleList:
    """The layers of this rank, each a unit of FSDP2, and its experts a unit of their own."""
    world_size = dist.get_world_size()
    all_ranks = init_device_mesh(device.type, (world_size,))
    meshes = init_device_mesh(device.type, (world_size // ep, ep), mesh_dim_names=("shard", "ep"))
    torch.manual_seed(1)  # FSDP2 takes a part of what each rank has, so all start with the same weights
    layers = nn.ModuleList(Layer(meshes["ep"]) for _ in range(LAYERS))
    torch.manual_seed(2 + meshes["ep"].get_local_rank())  # the experts are others on each rank of `ep`
    for layer in layers:
        for weight in layer.moe.experts.parameters():
            nn.init.normal_(weight, std=HIDDEN**-0.5)
        layer.to(device)
        experts = fully_shard(layer.moe.experts, mesh=meshes["shard"])
        # The mean over all ranks: an expert's gradient already contains the tokens of all ranks of `ep`.
        experts.set_gradient_divide_factor(world_size)
        experts.set_force_sum_reduction_for_comms(meshes["shard"].size() > 1)  # gloo can only sum
        fully_shard(layer, mesh=all_ranks)
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ep", type=int, default=2, help="expert parallel size, a divisor of the ranks")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    layers = sharded_layers(device, arguments.ep)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(10 + dist.get_rank())  # each rank has its own tokens
    for step in range(1, arguments.steps + 1):
        x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device)
        target, total = x.roll(1, dims=1).tanh(), torch.zeros((), device=device)
        for layer in layers:
            x, auxiliary_loss = layer(x)
            total = total + auxiliary_loss
        loss = nn.functional.mse_loss(x, target)
        optimizer.zero_grad()
        (loss + total).backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:4d}  loss {mean / dist.get_world_size():.4f}", flush=True)
    dist.barrier()
    os._exit(0)  # with gloo, torch 2.13 sometimes aborts while it frees the threads of FSDP2


if __name__ == "__main__":
    main()
