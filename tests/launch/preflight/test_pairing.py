import random

import pytest

from moe_exp.launch.preflight.verdicts import culprits, rounds_of_pairs


@pytest.mark.parametrize("count", range(1, 40))
def test_rounds_are_disjoint_and_everybody_has_partners(count):
    rounds = rounds_of_pairs(count)
    assert len(rounds) <= 6
    partners = {node: set() for node in range(count)}
    for partner_of in rounds:
        for a, b in partner_of.items():
            assert a != b and partner_of[b] == a and b not in partners[a]
            partners[a].add(b)
    assert all(len(found) >= min(2, count - 1) for found in partners.values())


def test_the_node_in_all_failed_pairs_is_blamed():
    assert culprits([]) == ([], [])
    assert culprits([(0, 1), (1, 2)]) == ([1], [])
    assert culprits([(2, 1), (0, 1), (1, 0)]) == ([1], [])
    assert culprits([(0, 1)]) == ([], [(0, 1)])  # either of them, or the way between
    assert culprits([(0, 1), (0, 2), (0, 3), (5, 6)]) == ([0], [(5, 6)])


def test_two_bad_nodes_of_many_are_found():
    draw = random.Random(7)
    for count in (6, 9, 16, 33):
        everybody = [pair for partner_of in rounds_of_pairs(count) for pair in partner_of.items()]
        bad = sorted(draw.sample(range(count), 2))
        assert culprits(pair for pair in everybody if set(pair) & set(bad)) == (bad, [])
