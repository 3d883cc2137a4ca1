"""Optimizers driven by Megatron's wrappers: AdamW with fp32, bf16 or 8-bit moments, and SGD with momentum.

Megatron expects that each parameter group has one `step`, and that a parameter's state contains only moments.
Each optimizer chooses the format of its moments in memory. For checkpoints, `moments` converts this format to
fp32 in the parameter's shape, and `set_moments` does the reverse. Checkpoints can therefore be loaded with
every layout and every optimizer that has the same moments. `p` is a parameter; with Megatron's distributed
optimizer, it is a flat fp32 range of a model parameter.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from moe_exp.engine.adamw import adamw_step, join, split, step_factors
from moe_exp.host.megatron_versions import refuse_cuda_graphs

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
AVERAGE = "ema"  # another state of a parameter, not used by the optimizers: see averaged_weights.py
BLOCK = 256  # values that share a scale in 8 bits, as in bitsandbytes' kernels
# Smaller tensors keep fp32 moments, as in bitsandbytes: norms are sensitive, and their moments take no space.
SMALL = 4096
_CHUNK = 1 << 22  # values quantized at once, to bound memory


class Adam(torch.optim.Optimizer):
    """AdamW (Loshchilov, Hutter 2019, arXiv:1711.05101) with FusedAdam's interface and PyTorch's kernel.

    `state_dtype`: dtype of the moments; None: dtype of the parameter. Moments in bf16 are updated in fp32
    (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
    """

    # Set by fused_step.py: whether `adamw_step` runs, the norm of all gradients on the device, its limit, and
    # the 16-bit weights to write, by main weight.
    uses_kernel, clip = False, 0.0
    norm: Tensor | None = None
    weights: Mapping[Tensor, Tensor] = {}

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, adam_w_mode: bool = True, capturable: bool = False,
        state_dtype: torch.dtype | None = None,
    ):  # fmt: skip
        if not adam_w_mode:
            rule = "only decoupled weight decay is supported"
            raise ValueError(f"adam_w_mode=False: {rule}. Fix: use decoupled_weight_decay=True.")
        refuse_cuda_graphs(capturable)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._dtype = state_dtype
        # By main weight, which then has no values of its own: int16 remainders (MAIN_PARAMS, see adamw.py),
        # or fp32 weights in host memory (`OffloadedAdam`).
        self.stored: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                # Kept in the group: PyTorch's AdamW has a step tensor per parameter, which Megatron does not
                # save. After a load all parameters share one, which advances once per parameter.
                group["step"] = group.get("step", 0) + 1
                params = [p for p in group["params"] if p.grad is not None]
                for p in params:
                    self.allocate(p, group)
                if self.uses_kernel and params:
                    self._update_by_kernel(group, params)
                else:
                    self._update(group, [p for p in params if p not in self.stored])
                    self.update_stored(group, [p for p in params if p in self.stored])

    def allocate(self, p: Tensor, group: Mapping[str, Any]) -> None:
        """Creates the moments of `p` as zeros if they do not exist yet."""
        if not self.state[p]:
            names = ("exp_avg", "exp_avg_sq")
            self.state[p] = {name: torch.zeros_like(p, dtype=self._dtype) for name in names}

    def join(self, p: Tensor) -> None:
        """If `p` is split (see `split`), makes it hold fp32 main weights again."""
        if p in self.stored:
            square = self.state[p]["exp_avg_sq"]
            p.data = join(self.weights[p], self.stored.pop(p), square)
            square.abs_()

    def split(self, p: Tensor) -> None:
        """Splits `p` into bf16 weights and a 16-bit remainder (MAIN_PARAMS=remainder), if not yet split."""
        if p not in self.stored:
            square = self.state[p]["exp_avg_sq"]
            weight, self.stored[p], signed = split(p.detach(), square)
            self.weights[p].copy_(weight)
            square.copy_(signed)
            # Megatron still uses shape, gradient and attributes. Reading yields NaN, and writing fails.
            p.data = p.new_full((), math.nan).expand_as(p)

    def update_stored(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Updates `params`, which are all split (see `split`)."""
        for p in params:
            with joined(self, p):
                self._update(group, [p])

    def _update(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        if self._dtype is None:
            _fused_adamw(group, params, [self.state[p] for p in params])
            return
        for p in params:
            found = moments(self, p)
            _fused_adamw(group, [p], [found])
            # rounds to nearest: a change by less than 2^-8 of a moment may be lost
            set_moments(self, p, found)

    def _update_by_kernel(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        step = torch.full((), float(group["step"]), dtype=torch.float64, device=params[0].device)
        factors = step_factors(
            self.norm, step, lr=group["lr"], betas=group["betas"], weight_decay=group["weight_decay"],
            clip=self.clip,
        )  # fmt: skip
        for p in params:
            assert p.grad is not None
            adamw_step(
                self.stored.get(p, p.detach()), p.grad, self.state[p]["exp_avg"],
                self.state[p]["exp_avg_sq"], self.weights.get(p), factors, betas=group["betas"],
                eps=group["eps"],
            )  # fmt: skip


def _fused_adamw(
    group: Mapping[str, Any], params: Sequence[Tensor], moments: Sequence[Mapping[str, Tensor]]
) -> None:
    if not params:
        return
    # the kernel increments each step tensor before use
    steps = torch.full((len(params),), float(group["step"] - 1), device=params[0].device)
    adamw(
        list(params), [p.grad for p in params if p.grad is not None],
        [moment["exp_avg"] for moment in moments], [moment["exp_avg_sq"] for moment in moments], [],
        list(steps.unbind()), fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
        lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip


class Adam8bit(Adam):
    """Adam with 8-bit moments. Uses bitsandbytes' kernels.

    As in Dettmers et al. 2022 (arXiv:2110.02861), a moment is `table[code] * scale`. The table has 256 values
    in [-1, 1] ([0, 1] for the second moment). There is one fp32 scale per 256 values of a tensor. Tensors
    with fewer than 4096 values have fp32 moments.

    Raises:
        ValueError: if the installed bitsandbytes kernels do not run on the parameters' device.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        import bitsandbytes.functional

        super().__init__(*args, **kwargs)
        self._kernels = bitsandbytes.functional
        self._tables: dict[torch.device, dict[str, Tensor]] = {}
        # A trial step: if bitsandbytes was built for another device, this fails before training, in one line.
        params = self.param_groups[0]["params"]
        device = params[0].device if params else torch.device("cpu")
        p = torch.zeros(SMALL, device=device)
        p.grad = torch.ones_like(p)
        try:
            self.allocate(p, self.param_groups[0])
            self._update({**self.param_groups[0], "step": 1, "lr": 0.0}, [p])
        except (RuntimeError, NameError, AttributeError, TypeError, NotImplementedError) as error:
            first_line = str(error).strip().partition("\n")[0]
            reason = f"{type(error).__name__}: {first_line}"
            rule = f"the kernels of the installed bitsandbytes do not run on {device.type} ({reason})"
            fix = "install another version of bitsandbytes, or set OPTIMIZER=adam"
            raise ValueError(f"OPTIMIZER=adam8bit: {rule}. Fix: {fix}.") from error
        finally:
            del self.state[p]

    def allocate(self, p: Tensor, group: Mapping[str, Any]) -> None:
        if self.state[p] or p.numel() < SMALL:
            super().allocate(p, group)
            return
        for name in ("exp_avg", "exp_avg_sq"):
            # Code 0 is the lowest value of the table, not 0. With a scale of 0 every code means 0.
            self.state[p][name] = torch.zeros_like(p, dtype=torch.uint8)
            self.state[p][f"{name}_scale"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)

    def is_in_8_bits(self, p: Tensor) -> bool:
        """Whether the moments of `p` are in 8 bits."""
        return bool(self.state[p]["exp_avg"].dtype == torch.uint8)

    def dequantized_moments(self, p: Tensor) -> dict[str, Tensor]:
        """The 8-bit moments of `p`, converted to fp32."""
        state = self.state[p]
        return {
            name: dequantized(state[name], state[f"{name}_scale"], self._table(p.device)[name]).view(p.shape)
            for name in ("exp_avg", "exp_avg_sq")
        }

    def quantize_moments(self, p: Tensor, values: Mapping[str, Tensor]) -> None:
        """Sets the 8-bit moments of `p` to the quantized `values`."""
        state = self.state[p]
        for name in ("exp_avg", "exp_avg_sq"):
            codes, scale = quantized(values[name], self._table(p.device)[name])
            state[name].copy_(codes.view(p.shape))
            state[f"{name}_scale"].copy_(scale)

    def _table(self, device: torch.device) -> dict[str, Tensor]:
        if device not in self._tables:
            make = self._kernels.create_dynamic_map
            signed, unsigned = make(signed=True).to(device), make(signed=False).to(device)
            self._tables[device] = {"exp_avg": signed, "exp_avg_sq": unsigned}
        return self._tables[device]

    def _update(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        super()._update(group, [p for p in params if not self.is_in_8_bits(p)])
        for p in filter(self.is_in_8_bits, params):
            state, table = self.state[p], self._table(p.device)
            self._kernels.optimizer_update_8bit_blockwise(
                "adam", p.grad, p, state["exp_avg"], state["exp_avg_sq"], *group["betas"], 0.0, 0.0,
                group["eps"], group["step"], float(group["lr"]), table["exp_avg"], table["exp_avg_sq"],
                state["exp_avg_scale"], state["exp_avg_sq_scale"], weight_decay=group["weight_decay"],
            )  # fmt: skip


def dequantized(codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    """`table[codes] * scale`, fp32 [n], for uint8 codes [n], fp32 scale [ceil(n / 256)] and table [256]."""
    flat, found = codes.reshape(-1), torch.empty(codes.numel(), device=codes.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        blocks = scale[start // BLOCK : -(-(start + part.numel()) // BLOCK)]
        found[start : start + _CHUNK] = table[part.int()] * blocks.repeat_interleave(BLOCK)[: part.numel()]
    return found


def quantized(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes nearest to `values`, uint8 [n], and a scale per 256 values, fp32 [ceil(n / 256)]."""
    # Each scale is the smallest with which the table covers its 256 values.
    flat, bounds = values.reshape(-1), (table[1:] + table[:-1]) / 2
    codes = torch.empty(flat.numel(), dtype=torch.uint8, device=flat.device)
    scales = []
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        blocks = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        scale = blocks.amax(1).clamp(min=0) / table[-1]
        if table[0] < 0:
            # bitsandbytes uses the largest absolute value. The lowest value of the signed table, however, is
            # -0.993; only with this scale does requantizing return the same scale and codes.
            scale = torch.maximum(scale, blocks.amin(1) / table[0])
        shares = blocks / torch.where(scale > 0, scale, 1.0)[:, None]
        nearest = torch.bucketize(shares, bounds).view(-1)[: part.numel()]
        codes[start : start + _CHUNK] = nearest.to(torch.uint8)
        scales.append(scale)
    return codes, torch.cat(scales) if scales else flat.new_empty(0)


class Sgd(torch.optim.SGD):
    """PyTorch's SGD, with momentum allocated at the start so that checkpoints before step 1 contain it.

    `m = momentum * m + (g + weight_decay * w)`, `w -= lr * m`. m starts at 0; results equal PyTorch's.
    """

    def allocate(self, p: Tensor, group: Mapping[str, Any]) -> None:
        """Creates the momentum of `p` as zeros if it does not exist yet."""
        if self.defaults["momentum"] and not self.state[p]:
            self.state[p] = {"momentum_buffer": torch.zeros_like(p)}


def allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """Creates the moments of all parameters of `optimizer`, an Adam or Sgd of this module."""
    assert isinstance(optimizer, Adam | Sgd)
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.allocate(p, group)


def stepped(part: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (model parameter, its tensor in the optimizer). `part`: one of Megatron's chained optimizers."""
    # Megatron has three kinds of optimizer. They step on this rank's fp32 ranges, on fp32 copies of 16-bit
    # parameters, or on the parameters themselves.
    if isinstance(part, DistributedOptimizer):
        parameters = [*part.model_float16_groups, *part.model_fp32_groups]
        tensors = [*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups]
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        parameters = [*part.float16_groups, *part.fp32_from_fp32_groups]
        tensors = [*part.fp32_from_float16_groups, *part.fp32_from_fp32_groups]
    else:
        parameters = tensors = [group["params"] for group in part.optimizer.param_groups]
    for of_group in zip(parameters, tensors, strict=True):
        yield from zip(*of_group, strict=True)


@contextmanager
def joined(optimizer: torch.optim.Optimizer, p: Tensor) -> Iterator[None]:
    """Makes `p` hold fp32 main weights inside the block; the block may change them."""
    adam = optimizer if isinstance(optimizer, Adam) and p in optimizer.stored else None
    if adam:
        adam.join(p)
    yield
    if adam:
        adam.split(p)


def moments(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    """fp32 moments of `p` in its shape, by name (see MOMENTS). Moments stored in fp32 are not copied."""
    if isinstance(optimizer, Adam8bit) and optimizer.is_in_8_bits(p):
        return optimizer.dequantized_moments(p)
    return {name: optimizer.state[p][name].float() for name in MOMENTS if name in optimizer.state[p]}


def set_moments(optimizer: torch.optim.Optimizer, p: Tensor, values: Mapping[str, Tensor]) -> None:
    """Sets the moments of `p` to `values`, which have the format that `moments` returns."""
    kept = optimizer.state[p]
    if all(kept.get(name) is value for name, value in values.items()):
        return  # `moments` returned the stored tensors themselves, which were changed in place
    if isinstance(optimizer, Adam8bit) and optimizer.is_in_8_bits(p):
        optimizer.quantize_moments(p, values)
    else:
        for name, value in values.items():
            kept[name].copy_(value)
