"""How layers are dealt out to pipeline stages. No torch."""

from __future__ import annotations


def split_layers(num_layers: int, num_stages: int, *, count_ends: bool = False) -> list[int]:
    """Layers of every stage, as even as they come; the longer stages are in the middle.

    Args:
        num_layers: of the model.
        num_stages: pipeline parallel size.
        count_ends: count the embedding and the output layer as a layer each, as is right for a large vocabulary: 106 layers over 12
            stages are 8, ten times 9, and 8.
    """
    if num_stages == 1:
        return [num_layers]
    items = num_layers + (2 if count_ends else 0)
    each, left = divmod(items, num_stages)
    stages = [each] * num_stages
    # A stage with one layer more: from the middle outwards, so that the ends, which have more to do, get theirs last.
    for index in sorted(range(num_stages), key=lambda stage: abs(2 * stage - (num_stages - 1)))[:left]:
        stages[index] += 1
    if count_ends:
        stages[0], stages[-1] = stages[0] - 1, stages[-1] - 1
    return stages
