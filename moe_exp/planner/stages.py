"""How layers are dealt out to pipeline stages. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


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
    outwards = sorted(range(num_stages), key=lambda stage: abs(2 * stage - (num_stages - 1)))
    if count_ends and not each:  # The ends have theirs whatever there is.
        outwards = [0, num_stages - 1, *outwards[:-2]]
    for index in outwards[:left]:
        stages[index] += 1
    if count_ends:
        stages[0], stages[-1] = stages[0] - 1, stages[-1] - 1
    return stages


def stages_text(stage_layers: Sequence[int]) -> str:
    """The layers of every stage in the form of PIPELINE_LAYERS: [8, 9, 9, 8] is 8,9*2,8."""
    runs = [(layers, len(list(same))) for layers, same in groupby(stage_layers)]
    return ",".join(f"{layers}*{times}" if times > 1 else str(layers) for layers, times in runs)
