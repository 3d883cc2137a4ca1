"""What tests of several parts of the layer compare with: activations by formula, drops by a loop, process
groups, counted operations and waits.
"""

import math
from collections import Counter

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def formula(name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    if name == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    if name == "clamped_swiglu":
        # At the limit the gradient is 1, as that of torch.clamp was before torch 2.14.
        gate, up = torch.where(gate > 7, 7, gate), torch.where(up > 7, 7, torch.where(up < -7, -7, up))
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    if name == "geglu":
        return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
    if name == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    assert name == "squared_relu"
    return x.clamp(min=0) ** 2


def kept_by_loop(experts: list[list[int]], weights: list[list[float]], capacity: int) -> list[list[bool]]:
    slots = [(t, k) for t in range(len(experts)) for k in range(len(experts[t]))]
    kept = [[False] * len(row) for row in experts]
    for expert in {expert for row in experts for expert in row}:
        queue = [(t, k) for t, k in slots if experts[t][k] == expert]
        for t, k in sorted(queue, key=lambda slot: -weights[slot[0]][slot[1]])[:capacity]:
            kept[t][k] = True
    return kept


def make_groups(ep: int, etp: int):
    # Megatron's order: neighbours share an expert, every ETP-th rank the expert parallel group.
    ep_groups = [dist.new_group(list(range(i, ep * etp, etp))) for i in range(etp)]
    etp_groups = [dist.new_group(list(range(i * etp, (i + 1) * etp))) for i in range(ep)]
    rank = dist.get_rank()
    return {"ep_group": ep_groups[rank % etp], "etp_group": etp_groups[rank // etp]}


class Operations(TorchDispatchMode):
    """Counts by name the operations that compute something; views do not."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation.overloadpacket.__name__] += not operation.is_view
        return operation(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Finds what makes the host wait for a GPU: values that become Python numbers, shapes that depend on
    values, and tensors made of Python numbers, which are copied to the GPU from unpinned memory.
    """

    BY_VALUE = (
        "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "equal", "is_nonzero",
        "lift_fresh",
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        unsized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in self.BY_VALUE or unsized or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self._calls = _Calls(self.found)
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._calls.__exit__(*error)


class _Calls(TorchFunctionMode):
    """Of `Waits`: what on a CPU calls no operation."""

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("tolist", "cpu", "numpy"):
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))
