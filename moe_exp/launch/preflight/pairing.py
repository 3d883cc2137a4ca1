"""Which nodes are measured together, and which to blame for failed or slow pairs. No torch.

A collective over all nodes is as slow as its slowest node, without naming it. So nodes are measured in pairs:
neighbors on a ring, and nodes half a ring apart, in rounds of disjoint pairs. A slow node is slow with every
partner; its partners are fast with others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Pair = tuple[int, int]


def rounds_of_pairs(count: int) -> list[list[Pair]]:
    """At most 6 rounds of disjoint pairs (a, b), a < b < count; two or more partners each if count > 2."""
    strides = [] if count < 2 else [1] if count < 4 else [1, max(2, count // 2)]
    edges = {tuple(sorted((i, (i + stride) % count))) for stride in strides for i in range(count)}
    rounds: list[list[Pair]] = []
    used: list[set[int]] = []
    for a, b in sorted(edges, key=lambda edge: ((edge[1] - edge[0]) % count not in (1, count - 1), edge)):
        free = (number for number, taken in enumerate(used) if a not in taken and b not in taken)
        place = next(free, len(rounds))
        if place == len(rounds):
            rounds.append([])
            used.append(set())
        rounds[place].append((a, b))
        used[place] |= {a, b}
    return rounds


def culprits(pairs: Iterable[Pair]) -> tuple[list[int], list[Pair]]:
    """Greedily finds the fewest nodes that explain the failed pairs, the one in most pairs first.

    Also returns the remaining pairs: a single failed connection does not show which end is at fault.
    """
    left = {(min(pair), max(pair)) for pair in pairs}
    blamed = []
    while left:
        counts = Counter(node for pair in left for node in pair)
        node, times = min(counts.items(), key=lambda item: (-item[1], item[0]))
        if times == 1:
            break
        blamed.append(node)
        left = {pair for pair in left if node not in pair}
    return sorted(blamed), sorted(left)
