"""Whether the optimizer's parameter groups are what they have to be: every trained parameter in one group, no norm or bias that decays.

A norm that falls into the decayed group makes the loss jump at a restart, and nothing else shows it. So what is looked at here is what
the optimizer steps on, not the rule by which `engine/optim.py` makes the groups: names and not dimensions, and the tensors that are in the
groups and not the map of who should be.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from moe_exp.checkpoint.state import unwrapped
from moe_exp.engine.initial_weights import global_name

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params


def named_parameters(model: list[DistributedDataParallel]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of this rank that train, by their names in the whole model (layers counted over all stages)."""
    for chunk in model:
        inner = unwrapped(chunk)
        yield from ((global_name(inner, name), parameter) for name, parameter in inner.named_parameters() if parameter.requires_grad)


def is_norm_or_bias(name: str) -> bool:
    """By its name: `decoder.layers.3.pre_mlp_layernorm.weight`, `...linear_qkv.layer_norm_weight`, `...linear_qkv.bias`, `...bias1`."""
    *_, module, last = ("", *name.split("."))
    return "norm" in last or "norm" in module or last.rstrip("12").endswith("bias")


def group_problems(model: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> list[str]:
    """A line for each parameter of this rank that decays and must not, or whose values the optimizer steps on more than once, or never."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    problems = []
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        groups: dict[int, list[Mapping[str, Any]]] = {}
        for group in part.optimizer.param_groups:
            for stepped in group["params"]:
                groups.setdefault(id(stepped), []).append(group)
        for parameter, stepped in _pairs(part):
            name, found = names.get(id(parameter), "a tensor that is no parameter"), groups.get(id(stepped), [])
            if len(found) != 1:
                problems.append(f"{name} is in {len(found)} parameter groups of the optimizer instead of one")
            elif is_norm_or_bias(name) and any(group.get("weight_decay") for group in found):
                problems.append(f"{name} is a norm or bias and decays (weight_decay {found[0]['weight_decay']:g})")
    return sorted(set(problems))


def stepped_values(model: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> Counter[str]:
    """How many values of each parameter this rank's optimizer steps on, 0 for none; with the distributed optimizer a part of them."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    found: Counter[str] = Counter(dict.fromkeys(names.values(), 0))
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            for parameter, stepped in _pairs(part):
                if id(parameter) in names:
                    found[names[id(parameter)]] += stepped.numel()
    return found


def _pairs(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """A parameter of the model, and the tensor of its values that is stepped on and copied back to it: itself, main weights, or a range."""
    of_groups: tuple[tuple[Any, Any], ...]
    if isinstance(part, DistributedOptimizer):
        of_groups = ((part.model_float16_groups, part.shard_fp32_from_float16_groups), (part.model_fp32_groups, part.shard_fp32_groups))
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        of_groups = ((part.float16_groups, part.fp32_from_float16_groups), (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups))
    else:
        own = [group["params"] for group in part.optimizer.param_groups]
        of_groups = ((own, own),)
    for parameters, stepped in of_groups:
        for pair in zip(parameters, stepped, strict=True):
            yield from zip(*pair, strict=True)
