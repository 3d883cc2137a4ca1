"""Trains a small language model whose MLP is the MoE layer, in a plain torch loop of your own.

    python examples/own_loop.py            # 15 seconds on a CPU

It learns the bytes of this file with causal attention and 8 experts, and prints the loss and a text that it
generates. Nothing here needs Megatron.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_exp.layers.dispatcher import LocalDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig

VOCAB, HIDDEN, HEADS, EXPERTS, TOPK, LAYERS, LENGTH, BATCH = 256, 64, 4, 8, 2, 2, 64, 8


class Block(nn.Module):
    """Causal attention, then the MoE layer instead of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoELayer(
            router=Router(RouterConfig(hidden_size=HIDDEN, num_experts=EXPERTS, topk=TOPK)),
            dispatcher=LocalDispatcher(EXPERTS),
            experts=Experts(
                num_local_experts=EXPERTS,
                hidden_size=HIDDEN,
                ffn_size=64,
                activation="swiglu",
                backend="loop",
            ),
            settings=MoESettings(losses=(AuxLoss("aux_loss", 1e-2),), z_loss_coeff=1e-3),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y, auxiliary_loss = self.moe(self.moe_norm(x))
        return x + y, auxiliary_loss


class Model(nn.Module):
    """Bytes [B, S] to logits [B, S, 256], and the sum of the auxiliary losses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens) + self.positions.weight[: tokens.size(1)]
        auxiliary_loss = x.new_zeros(())
        for block in self.blocks:
            x, loss = block(x)
            auxiliary_loss = auxiliary_loss + loss
        return self.output(self.norm(x)), auxiliary_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    num_steps = parser.parse_args().steps
    torch.manual_seed(1)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, num_steps + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        logits, auxiliary_loss = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + auxiliary_loss).backward()
        optimizer.step()
        if step % 20 == 0 or step == num_steps:
            print(f"step {step:4d}  loss {loss:.3f}  auxiliary loss {auxiliary_loss:.4f}")

    tokens = text[:16][None]
    with torch.no_grad():
        for _ in range(40):
            tokens = torch.cat([tokens, model(tokens[:, -LENGTH:])[0][:, -1:].argmax(-1)], dim=1)
    print(bytes(tokens[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
