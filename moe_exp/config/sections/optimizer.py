"""Settings of the optimizer, of averages of the weights, and of numbers: seed, determinism, data types.

A rule between settings of several sections stands in the last of them (sections/launch.py). The packages that
an optimizer needs are seen to by launch/machine_checks.py.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from moe_exp.config.choices import EXPERT_BACKENDS, OPTIMIZERS, ExpertBackend, one_of
from moe_exp.config.errors import multiples, problem
from moe_exp.config.sections.learning import LearningSettings
from moe_exp.config.setting_types import Positive, Probability, Rate, Seed, learning

# bf16 has 8 bits of precision: relative changes below 2^-8 may be rounded away.
_LARGEST_BF16_BETA = 1 - 2**-8

# For DETERMINISTIC, as Megatron-LM's --deterministic-mode has them; engine/runtime.py configures torch.
# Variables that CUDA's libraries read at start, and values with a fixed order of summation; the first is our
# default. Other NCCL algorithms are repeatable, too, but a tree's order depends on the topology.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring",),
    # required by Megatron's Transformer Engine attention
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


class OptimizerSettings(LearningSettings):
    """The section Optimization from OPTIMIZER on."""

    optimizer: Annotated[str, one_of(OPTIMIZERS)] = learning(
        "adam",
        "; ".join(f"{name}: {it.text}" if it.text else name for name, it in OPTIMIZERS.items()),
        costs=True,
    )
    optimizer_state_dtype: Literal["fp32", "bf16"] = learning(
        "fp32", "type of the two moments of OPTIMIZER=adam", costs=True
    )
    sgd_momentum: Probability = learning(
        0.9, "momentum (OPTIMIZER=sgd); 0: none, and no optimizer state", costs=True
    )
    muon_momentum: Probability = learning(0.95, "momentum (OPTIMIZER=muon)")
    qk_clip: Rate = learning(
        0.0,
        "largest attention logit: a head with a larger one gets smaller query and key projections after the "
        "step (QK-clip, with OPTIMIZER=muon MuonClip; Kimi K2 has 100); 0: off",
        costs=True,
    )
    weight_decay: Rate = learning(
        0.1,
        "weight decay; decoupled with Adam and Muon, added to the gradient with SGD; never applied to "
        "norms and biases",
    )
    adam_beta1: Probability = learning(0.9, "AdamW beta 1")
    adam_beta2: Probability = learning(0.95, "AdamW beta 2")
    adam_eps: float = learning(1e-08, "AdamW epsilon", gt=0)
    clip_grad: Rate = learning(1.0, "maximum gradient norm; 0: no clipping")
    ema_decay: Probability = learning(
        0.0,
        "decay of an exponential moving average of the weights, such as 0.999, in fp32 and in checkpoints, "
        "validated as ema_lm_loss; 0: none",
        costs=True,
    )
    average_every: Positive = learning(
        1, "with EMA_DECAY: optimizer steps between updates of the average", measured=1
    )
    seed: Seed = learning(1234, "seed of weights, data order and dropout")
    deterministic: bool = learning(
        False,
        "bit-identical results in every start on the same GPUs, software and layout, by deterministic "
        "algorithms, which may be slower; an operation without one ends the run",
        costs=True,
    )
    dtype: Literal["fp32", "bf16", "fp16"] = learning(
        "bf16", "compute type; gradients are accumulated in fp32", costs=True
    )

    def deterministic_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables that DETERMINISTIC needs and `environ` lacks."""
        needed = ENVIRONMENT if self.deterministic else {}
        return {name: values[0] for name, values in needed.items() if not environ.get(name)}

    def environment_problems(self, environ: Mapping[str, str]) -> Iterator[str]:
        """Yields a line for each variable of `environ` that conflicts with DETERMINISTIC."""
        for name, values in ENVIRONMENT.items() if self.deterministic else ():
            if (value := environ.get(name)) and value not in values:
                fix = f"unset {name}, or set {name}={' or '.join(values)}, or DETERMINISTIC=false"
                yield problem(name, value, "DETERMINISTIC=true needs sums in one order", fix)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self._optimizer_problems()
        if self.optimizer_state_dtype == "bf16":
            yield from self._state_problems()
        if self.use_moe:
            yield from self._dispatcher_problems()
            yield from self._expert_backend_problems()

    def _optimizer_problems(self) -> Iterator[str]:
        optimizer = OPTIMIZERS[self.optimizer]
        return self.broken(
            (self.distributed_optimizer and not optimizer.is_sharded, "distributed_optimizer",
             f"OPTIMIZER={self.optimizer} needs whole matrices, and the distributed optimizer gives a rank"
             " ranges of values", "set DISTRIBUTED_OPTIMIZER=false, or OPTIMIZER=adam"),
            (self.parametrization == "mup" and optimizer.moments != "adam", "parametrization",
             f"does not go with OPTIMIZER={self.optimizer}, as its rules are for Adam", "set OPTIMIZER=adam"),
            (self.ema_decay and self.average_every > self.train_iters, "average_every",
             f"with TRAIN_ITERS={self.train_iters} the average of EMA_DECAY={self.ema_decay:g} would have no"
             " weights", f"set it to at most {self.train_iters}"),
            (self.qk_clip and self.distributed_optimizer, "qk_clip",
             "the distributed optimizer gives a rank ranges of values, not the rows of a head",
             "set DISTRIBUTED_OPTIMIZER=false, or QK_CLIP=0"),
            (self.qk_clip and self.qk_norm and not self.multi_latent_attention, "qk_clip",
             "QK_NORM=true undoes every scaling of queries and keys, and bounds the logits itself",
             "set QK_CLIP=0, or QK_NORM=false"),
            (self.fp8 != "none" and self.dtype != "bf16", "fp8",
             f"is for the products of a model in bf16, but DTYPE={self.dtype}",
             "set DTYPE=bf16, or FP8=none"),
        )  # fmt: skip

    def _state_problems(self) -> Iterator[str]:
        """Moments in bf16."""
        if not OPTIMIZERS[self.optimizer].has_bf16:
            rule = f"is of the moments of Adam, but OPTIMIZER={self.optimizer}"
            fix = "set OPTIMIZER_STATE_DTYPE=fp32, or OPTIMIZER=adam"
            yield self.problem("optimizer_state_dtype", rule, fix)
            return
        for name in ("adam_beta1", "adam_beta2"):
            if getattr(self, name) > _LARGEST_BF16_BETA:
                rule = "a moment of OPTIMIZER_STATE_DTYPE=bf16 would not decay any more, its change in a step"
                fix = f"set {name.upper()} to at most {_LARGEST_BF16_BETA:.3f}, or OPTIMIZER_STATE_DTYPE=fp32"
                yield self.problem(name, f"{rule} is lost by rounding", fix)

    def _dispatcher_problems(self) -> Iterator[str]:
        """DeepEP's requirements; package and GPU are checked when the layer is built."""
        is_deepep = self.dispatcher == "deepep"
        return self.broken(
            (is_deepep and self.dtype != "bf16", "dispatcher",
             f"sends bf16 rows, but DTYPE={self.dtype}", "set DTYPE=bf16 or DISPATCHER=alltoall"),
            # deepseek-ai/DeepEP issue 589: torch then fills new tensors on another stream than DeepEP writes
            # on.
            (is_deepep and self.deterministic, "dispatcher",
             "its package may return NaN with the algorithms of DETERMINISTIC=true",
             "set DISPATCHER=alltoall, or DETERMINISTIC=false"),
        )  # fmt: skip

    def _expert_backend_problems(self) -> Iterator[str]:
        backend = EXPERT_BACKENDS.get(self.expert_backend, ExpertBackend())  # auto takes one that can
        if backend.dtypes and self.dtype not in backend.dtypes:
            rule = f"computes in {' and '.join(backend.dtypes)} only, not in {self.dtype}"
            fix = f"set DTYPE={backend.dtypes[0]}, or EXPERT_BACKEND=auto"
            yield self.problem("expert_backend", rule, fix)
        row_bytes, num_bytes = backend.row_bytes, 4 if self.dtype == "fp32" else 2
        widths = (
            (self.expert_hidden_setting, self.expert_hidden_size, 1),
            (self.expert_ffn_setting, self.expert_ffn_size, self.etp),
        )
        for name, value, ways in widths:
            if value // ways * num_bytes % row_bytes:
                row = f"{name.upper()} / ETP={ways}" if ways > 1 else name.upper()
                rule = f"EXPERT_BACKEND={self.expert_backend} needs rows of a multiple of {row_bytes} bytes"
                sizes = multiples(row_bytes // num_bytes * ways, value)
                fix = f"set {name.upper()} to {sizes}, or EXPERT_BACKEND=loop"
                yield problem(name, value, f"{rule}, {row} in {self.dtype} is no such row", fix)
