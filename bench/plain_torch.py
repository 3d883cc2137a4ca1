"""The tiny dense or MoE GPT in plain torch, as one would write it in an hour: what `bench_step.py` compares
moe_exp with.

One file, no parallelism, nothing but torch. Same sizes (`small_model.py`) and mathematics as moe_exp, so with
the same weights it has the same losses: `python bench/bench_step.py --check`.

B batch, S sequence, T tokens, D hidden, H query heads, G key/value heads, d head size, V vocabulary, E
experts, K top-k.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class GPTConfig:
    """Sizes and settings; the names are those of `moe_exp.config`."""

    num_layers: int = 4
    hidden_size: int = 128
    ffn_hidden_size: int = 256
    num_heads: int = 4
    num_query_groups: int = 2
    seq_len: int = 256
    vocab_size: int = 4096
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-5
    num_experts: int = 0  # 0: dense
    topk: int = 1
    aux_loss_coeff: float = 1e-2
    z_loss_coeff: float = 1e-3

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def rotary_tables(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, [S, d]; the two halves of a head are rotated against each other."""
    frequencies = 1.0 / config.rotary_base ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angles = torch.outer(torch.arange(config.seq_len).float(), frequencies)
    return torch.cat([angles.cos()] * 2, dim=-1), torch.cat([angles.sin()] * 2, dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, S, d]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Norm(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.num_heads, self.num_groups, self.head_dim = (
            config.num_heads,
            config.num_query_groups,
            config.head_dim,
        )
        self.qkv = nn.Parameter(
            torch.empty(
                (config.num_heads + 2 * config.num_query_groups) * config.head_dim, config.hidden_size
            )
        )
        self.out = nn.Parameter(torch.empty(config.hidden_size, config.num_heads * config.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq_len, _ = x.shape
        heads = F.linear(x, self.qkv).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.num_heads, self.num_groups, self.num_groups], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.num_heads != self.num_groups
        )
        return F.linear(y.transpose(1, 2).reshape(batch, seq_len, -1), self.out)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Parameter(torch.empty(2 * config.ffn_hidden_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.hidden_size, config.ffn_hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        return swiglu(x, self.up, self.down), 0.0


def swiglu(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = F.linear(x, up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * value, down)


class MoE(nn.Module):
    """Softmax, top-k, load-balancing and z-loss, no token dropped; experts one after the other over tokens
    sorted by expert.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.router = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.up = nn.Parameter(
            torch.empty(config.num_experts, 2 * config.ffn_hidden_size, config.hidden_size)
        )
        self.down = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.ffn_hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        tokens = x.view(-1, x.size(-1))
        logits, probs, weights, experts = self.route(tokens)
        counts = torch.bincount(experts.flatten(), minlength=config.num_experts)

        order = experts.flatten().argsort(stable=True)
        rows = tokens.index_select(0, order // config.topk).split(counts.tolist())
        # unbind, not indexing: one gradient for all experts instead of a full-size one for each.
        outputs = [
            swiglu(row, up, down)
            for row, up, down in zip(rows, self.up.unbind(), self.down.unbind(), strict=True)
        ]
        weighted = torch.cat(outputs) * weights.flatten()[order].unsqueeze(-1)
        y = torch.zeros_like(tokens).index_add(0, order // config.topk, weighted)
        return y.view_as(x), self.auxiliary_loss(logits, probs, counts)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = F.linear(tokens, self.router)
        probs = logits.softmax(dim=-1)
        weights, experts = probs.topk(self.config.topk, dim=-1)
        return logits, probs, weights, experts

    def auxiliary_loss(self, logits: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        balance = self.config.num_experts * torch.dot(counts / counts.sum(), probs.mean(dim=0))
        z = logits.logsumexp(dim=-1).square().mean()
        return self.config.aux_loss_coeff * balance + self.config.z_loss_coeff * z


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm, self.attention = Norm(config), Attention(config)
        self.mlp_norm, self.mlp = Norm(config), MoE(config) if config.num_experts else MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | float]:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y, aux = self.mlp(self.mlp_norm(x))
        return x + y, aux


class GPT(nn.Module):
    """Untied embedding and output, RMSNorm before each part, rotary positions, grouped queries, SwiGLU."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = Norm(config)
        self.output = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S] token ids and next tokens; the cross entropy, and that plus the auxiliary losses."""
        x = F.embedding(tokens, self.embedding)
        total_aux: Tensor | float = 0.0
        for block in self.blocks:
            x, aux = block(x, self.cos, self.sin)
            total_aux = total_aux + aux
        logits = F.linear(self.norm(x), self.output)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1))
        return loss, loss + total_aux


def build_adamw(
    model: GPT, *, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW, no weight decay on norms."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, microbatches: list[Tensor], *, lr: float, clip_grad: float
) -> float:
    """One step over micro-batches of [B, S+1] token ids; the mean cross entropy."""
    optimizer.zero_grad()
    losses = []
    for tokens in microbatches:
        loss, total = model(tokens[:, :-1], tokens[:, 1:])
        (total / len(microbatches)).backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return torch.stack(losses).mean().item()
