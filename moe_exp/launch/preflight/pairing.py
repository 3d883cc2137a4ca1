"""Who is measured with whom, and who is to blame for pairs that fail or are slow. No torch.

A collective over all nodes is as slow as its slowest node, and says nothing of which that is. So nodes are
measured in pairs: neighbours on a ring, and nodes half a ring apart, in rounds of pairs that have no node in
common. A slow node is slow with every partner; its partners are fast with their others, and that is what
tells them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Pair = tuple[int, int]


def rounds_of_pairs(count: int) -> list[list[Pair]]:
    """Rounds of disjoint pairs of 0..count-1: everybody has at least two partners where there are three or
    more.

    Returns:
        At most 6 rounds, each with pairs (a, b), a < b.
    """
    edges = {tuple(sorted((i, (i + stride) % count))) for stride in _strides(count) for i in range(count)}
    rounds: list[list[Pair]] = []
    used: list[set[int]] = []
    for a, b in sorted(edges, key=lambda edge: ((edge[1] - edge[0]) % count not in (1, count - 1), edge)):
        place = next(
            (number for number, taken in enumerate(used) if a not in taken and b not in taken), len(rounds)
        )
        if place == len(rounds):
            rounds.append([])
            used.append(set())
        rounds[place].append((a, b))
        used[place] |= {a, b}
    return rounds


def _strides(count: int) -> list[int]:
    if count < 2:
        return []
    return [1] if count < 4 else [1, max(2, count // 2)]


def culprits(pairs: Iterable[Pair]) -> tuple[list[int], list[Pair]]:
    """Nodes to blame for failed pairs: the fewest that are in all of them, by taking the one in most pairs
    first.

    Returns:
        The nodes, and the pairs that are left over: one failed connection says nothing of which of its ends
            is at fault.
    """
    left = {(min(pair), max(pair)) for pair in pairs}
    blamed = []
    while left:
        (node, times), *_ = sorted(
            Counter(node for pair in left for node in pair).items(), key=lambda item: (-item[1], item[0])
        )
        if times == 1:
            break
        blamed.append(node)
        left = {pair for pair in left if node not in pair}
    return sorted(blamed), sorted(left)
