import pytest
import torch
import torch.distributed as dist

from helpers.layers.tiny_moe import identity_router, random
from helpers.ranks import run_on_ranks
from moe_exp.layers.dispatcher import LocalDispatcher
from moe_exp.layers.microbatch import MoESettings, expert_capacity, keep_full_tiles, keep_within_capacity
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router.decision import count_per_expert


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "topk", "factor", "least", "capacity"),
    [
        (10, 4, 2, 1.0, 0, 5),
        (10, 4, 1, 1.0, 0, 3),
        (10, 4, 2, 1.25, 0, 7),
        (10, 4, 2, 0.5, 0, 3),
        (10, 4, 2, 0.5, 4, 4),
        (10, 4, 2, 1.0, 4, 5),
        (1, 64, 1, 1.0, 0, 1),
        (8, 8, 1, 8.0, 0, 8),
        # 200 / 6 * 0.9 is just over 30 in floating point, as in Megatron; 200 * 0.9 / 6 would be 30
        (200, 6, 1, 0.9, 0, 31),
    ],
)
def test_expert_capacity(num_tokens, num_experts, topk, factor, least, capacity):
    others = {"num_experts": num_experts, "topk": topk, "capacity_factor": factor, "min_capacity": least}
    assert expert_capacity(num_tokens, **others) == capacity
    assert expert_capacity(torch.tensor(num_tokens), **others) == capacity


# Ten tokens, two slots each, of three experts: eight slots of expert 0, seven of 1, five of 2.
TEN_TK = [[0, 1], [0, 2], [1, 0], [0, 1], [2, 0], [1, 2], [0, 1], [0, 2], [1, 0], [2, 1]]
# Weights of the first slots; those of a token sum to 1.
FIRST_T = [0.9, 0.6, 0.7, 0.8, 0.55, 0.52, 0.51, 0.95, 0.65, 0.75]


@pytest.mark.parametrize(
    ("experts", "first", "capacity", "kept"),
    [
        # Expert 0 keeps .95 .9 .8 .6; 1 keeps .7 .65 .52 .49; 2 keeps .75 .55 .48 .4 and drops .05.
        (TEN_TK, FIRST_T, 4, "10 11 10 10 10 11 01 10 10 10"),
        # By position, expert 0 keeps tokens 0 to 3; expert 1 keeps 0, 2, 3, 5; expert 2 keeps 1, 4, 5, 7.
        (TEN_TK, None, 4, "11 11 11 11 10 11 00 01 00 00"),
        # Ties by position. Expert 0: both .9, then the first of the .5; expert 1: all three.
        (
            [[0], [0], [1], [0], [0], [1], [0], [1], [0], [0]],
            [0.5, 0.5, 0.2, 0.9, 0.5, 0.2, 0.5, 0.3, 0.9, 0.5],
            3,
            "1 0 1 1 0 1 0 1 1 0",
        ),
        # Expert 3 of 3 is padding, in no queue.
        ([[3], [0], [3], [0], [0], [1]], None, 2, "0 1 0 1 0 1"),
        ([[3], [0], [3], [0], [0], [1]], [0.9, 0.1, 0.9, 0.2, 0.3, 0.4], 2, "0 0 0 1 1 1"),
    ],
)
def test_slots_over_capacity_are_dropped_by_hand(experts, first, capacity, kept):
    weights_TK = None
    if first is not None:
        weights_TK = torch.tensor([[weight, 1 - weight][: len(experts[0])] for weight in first])
    found = keep_within_capacity(torch.tensor(experts), weights_TK, num_experts=3, capacity=capacity)
    assert " ".join("".join(map(str, row)) for row in found.int().tolist()) == kept


def test_rows_are_rounded_down_to_full_tiles_by_hand():
    # Tiles of 3. Expert 0 has seven slots and keeps six, expert 1 exactly three; expert 2 has fewer than a
    # tile and keeps both. Of the two of weight .5 the later one goes. Expert 3 of 3 is padding.
    expert_TK = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 1], [0, 2], [0, 3], [0, 3]])
    first_T = torch.tensor([0.9, 0.5, 0.6, 0.7, 0.5, 0.8, 0.7])
    weights_TK = torch.stack([first_T, 1 - first_T], dim=1)
    kept = [[1, 1], [1, 1], [1, 1], [1, 1], [0, 1], [1, 0], [1, 0]]
    assert keep_full_tiles(expert_TK, weights_TK, num_experts=3, tile=3).int().tolist() == kept
    assert torch.equal(keep_full_tiles(expert_TK, weights_TK, num_experts=3, tile=1), expert_TK < 3)


def test_count_per_expert_by_hand():
    counts_E = count_per_expert(torch.tensor([3, 0, 3, 3, 1]), 5)
    assert counts_E.tolist() == [1, 1, 0, 3, 0]
    assert counts_E.dtype == torch.int64


NUM_EXPERTS = 4


def capacity_layer(factor: float, **groups) -> MoELayer:
    router, dispatcher = identity_router(NUM_EXPERTS, 2), LocalDispatcher(NUM_EXPERTS)
    experts = torch.nn.Identity()
    experts.needs_padding = True
    parts = {"router": router, "dispatcher": dispatcher, "experts": experts}
    return MoELayer(**parts, settings=MoESettings(capacity_factor=factor), **groups)


def tied_logits(num_tokens: int) -> torch.Tensor:
    """Of eight different rows, so that most weights are the same as others."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 4, (8, NUM_EXPERTS), generator=generator) + torch.tensor([1.5, 0.5, 0.25, 0.0])
    return rows[torch.randint(0, 8, (num_tokens,), generator=generator)]


# Which tokens each rank has, in blocks of the sequence. Megatron's order for context parallelism; where a
# rank has one block of a context parallel layout, its half of the pair is the tensor parallel part.
SPLITS = {
    "2 ranks": (1, [[0], [1]]),
    "4 ranks": (1, [[0], [1], [2], [3]]),
    "2 ranks, cp 2": (2, [[0, 3], [1, 2]]),
    "4 ranks, cp 2": (2, [[0], [3], [1], [2]]),
    "4 ranks, cp 4": (4, [[0, 7], [1, 6], [2, 5], [3, 4]]),
}


def kept_on_rank(
    x_TD: torch.Tensor, blocks: list[list[int]], context_parallel_size: int, factor: float
) -> torch.Tensor:
    groups = {"microbatch_group": dist.group.WORLD, "context_parallel_size": context_parallel_size}
    parts = x_TD.chunk(sum(len(row) for row in blocks))
    mine_TD = torch.cat([parts[block] for block in blocks[dist.get_rank()]])
    return capacity_layer(factor, **groups).route(mine_TD).kept_TK


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("tied", [True, False])
def test_drops_do_not_depend_on_the_split_over_ranks(split, tied):
    context_parallel_size, blocks = SPLITS[split]
    x_TD = tied_logits(48) if tied else random(48, NUM_EXPERTS, seed=4).float()
    expected_TK = capacity_layer(0.75).route(x_TD).kept_TK
    assert 12 <= (~expected_TK).sum() <= 48
    ranks = run_on_ranks(len(blocks), kept_on_rank, x_TD, blocks, context_parallel_size, 0.75)
    order = [block for row in blocks for block in row]
    by_block = torch.cat(ranks).chunk(len(order))
    kept_TK = torch.cat([by_block[order.index(block)] for block in range(len(order))])
    assert torch.equal(kept_TK, expected_TK)


def test_router_weights_keep_their_gradient():
    expert_TK, weights_TK = torch.zeros(4, 1, dtype=torch.int64), torch.rand(4, 1, requires_grad=True)
    assert not keep_within_capacity(expert_TK, weights_TK, num_experts=1, capacity=2).requires_grad
