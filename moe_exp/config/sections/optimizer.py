"""Settings for optimizer, weight averaging, seed, determinism and data types.

launch/machine_checks.py checks whether the optimizer's packages are installed.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from moe_exp.config.choices import EXPERT_BACKENDS, OPTIMIZERS, ExpertBackend, one_of
from moe_exp.config.errors import multiples, problem
from moe_exp.config.sections.learning import LearningSettings
from moe_exp.config.setting_types import Positive, Probability, Rate, Seed
from moe_exp.config.traits import costly, learning

# bf16 has 8 bits of precision: relative changes below 2^-8 may be rounded away.
_LARGEST_BF16_BETA = 1 - 2**-8

# Variables for DETERMINISTIC that CUDA libraries read at start, as in Megatron-LM's --deterministic-mode. The
# values fix the order of summation; the first is our default. engine/runtime.py configures PyTorch. Other
# NCCL algorithms are repeatable too, but the order of a tree depends on the topology.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring",),
    # required by Megatron's Transformer Engine attention
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


class OptimizerSettings(LearningSettings):
    """Settings of the section Optimization, from OPTIMIZER to DTYPE."""

    optimizer: Annotated[str, one_of(OPTIMIZERS)] = costly(
        "adam", "; ".join(f"{name}: {it.text}" if it.text else name for name, it in OPTIMIZERS.items())
    )
    optimizer_state_dtype: Literal["fp32", "bf16"] = costly(
        "fp32", "data type of Adam's two moments (OPTIMIZER=adam)"
    )
    main_params: Literal["auto", "fp32", "remainder"] = costly(
        "auto",
        "how bf16 runs store the fp32 main weights; fp32: a full copy; remainder: only the 16 bits that the "
        "bf16 weights lack (same results); auto: remainder if possible (on GPUs with OPTIMIZER=adam), else "
        "fp32",
        compared=False,
    )
    grad_dtype: Literal["fp32", "bf16"] = costly(
        "fp32",
        "data type in which gradients are accumulated over micro-batches and reduced across ranks; bf16 "
        "saves 2 bytes per parameter, but rounds at every micro-batch (docs/optimizers.md)",
    )
    offload_optimizer: bool = costly(
        False,
        "keep fp32 main weights and moments in host memory, and update them there; the GPU keeps 6 bytes per "
        "parameter; requires OPTIMIZER=adam and DTYPE=bf16",
        compared=False,
    )
    sgd_momentum: Probability = costly(0.9, "momentum (OPTIMIZER=sgd); 0: no momentum and no optimizer state")
    muon_momentum: Probability = learning(0.95, "momentum (OPTIMIZER=muon)")
    qk_clip: Rate = costly(
        0.0,
        "maximum attention logit: after each step, the query and key projections of heads with larger logits "
        "are scaled down (QK-clip, or MuonClip with OPTIMIZER=muon; Kimi K2 uses 100); 0: off",
    )
    weight_decay: Rate = learning(
        0.1,
        "weight decay; decoupled for Adam and Muon, added to the gradient for SGD; not applied to norms and "
        "biases",
    )
    adam_beta1: Probability = learning(0.9, "AdamW beta 1")
    adam_beta2: Probability = learning(0.95, "AdamW beta 2")
    adam_eps: float = learning(1e-08, "AdamW epsilon", gt=0)
    clip_grad: Rate = learning(1.0, "maximum gradient norm; 0: no clipping")
    ema_decay: Probability = costly(
        0.0,
        "decay of an exponential moving average of the weights, such as 0.999; the average is in fp32, saved "
        "in checkpoints and evaluated as ema_lm_loss; 0: no average",
    )
    average_every: Positive = learning(
        1, "optimizer steps between updates of the weights' moving average (with EMA_DECAY)"
    )
    seed: Seed = learning(1234, "random seed for weights, data order and dropout")
    deterministic: bool = costly(
        False,
        "use deterministic algorithms: bit-identical results on the same GPUs, software and parallel layout; "
        "may be slower; operations without a deterministic algorithm end the run",
    )
    dtype: Literal["fp32", "bf16", "fp16"] = costly("bf16", "data type for computation")

    def deterministic_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Environment variables that DETERMINISTIC requires but `environ` does not define."""
        needed = ENVIRONMENT if self.deterministic else {}
        return {name: values[0] for name, values in needed.items() if not environ.get(name)}

    def environment_problems(self, environ: Mapping[str, str]) -> Iterator[str]:
        """Yields a line for each variable of `environ` that conflicts with DETERMINISTIC."""
        for name, values in ENVIRONMENT.items() if self.deterministic else ():
            if (value := environ.get(name)) and value not in values:
                fix = f"unset {name}, or set {name}={' or '.join(values)}, or DETERMINISTIC=false"
                yield problem(name, value, "lets the order of summation vary, but DETERMINISTIC=true", fix)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self._optimizer_problems()
        if self.use_moe:
            yield from self._expert_backend_problems()

    def _optimizer_problems(self) -> Iterator[str]:
        """Checks the settings of the optimizer, its state, the data types and DeepEP. Building the
        MoE layer checks whether DeepEP is installed and a GPU is present.
        """
        optimizer, is_deepep = OPTIMIZERS[self.optimizer], self.use_moe and self.dispatcher == "deepep"
        is_bf16 = self.optimizer_state_dtype == "bf16"
        return self.broken(
            (self.distributed_optimizer and not optimizer.is_sharded, "distributed_optimizer",
             f"OPTIMIZER={self.optimizer} requires whole matrices, but the distributed optimizer splits"
             " them", "set DISTRIBUTED_OPTIMIZER=false, or OPTIMIZER=adam"),
            (self.parametrization == "mup" and optimizer.moments != "adam", "parametrization",
             f"cannot be combined with OPTIMIZER={self.optimizer}: muP requires Adam", "set OPTIMIZER=adam"),
            (self.ema_decay and self.average_every > self.train_iters, "average_every",
             f"must be at most TRAIN_ITERS={self.train_iters}, otherwise EMA_DECAY={self.ema_decay:g} has no "
             "effect", f"set AVERAGE_EVERY to at most {self.train_iters}"),
            (self.qk_clip and self.distributed_optimizer, "qk_clip",
             "requires whole heads, but the distributed optimizer splits them",
             "set DISTRIBUTED_OPTIMIZER=false, or QK_CLIP=0"),
            (self.qk_clip and self.qk_norm and not self.multi_latent_attention, "qk_clip",
             "cannot be combined with QK_NORM=true, which undoes any scaling of queries and keys and already "
             "bounds the logits", "set QK_CLIP=0, or QK_NORM=false"),
            (self.fp8 != "none" and self.dtype != "bf16", "fp8",
             f"requires DTYPE=bf16, not {self.dtype}",
             "set DTYPE=bf16, or FP8=none"),
            (self.grad_dtype == "bf16" and self.dtype != "bf16", "grad_dtype",
             f"requires DTYPE=bf16, not {self.dtype}", "set DTYPE=bf16, or GRAD_DTYPE=fp32"),
            *((is_set and getattr(self, name) != value, setting,
               f"requires {name.upper()}={value}, not {getattr(self, name)}",
               f"set {name.upper()}={value}, or {setting.upper()}={other}")
              for name, value in (("dtype", "bf16"), ("optimizer", "adam"), ("qk_clip", 0))
              for setting, is_set, other in (("main_params", self.main_params == "remainder", "fp32"),
                                             ("offload_optimizer", self.offload_optimizer, "false"))),
            (self.offload_optimizer and self.main_params == "remainder", "offload_optimizer",
             "requires fp32 main weights, but MAIN_PARAMS=remainder", "set MAIN_PARAMS=auto"),
            (is_bf16 and not optimizer.has_bf16, "optimizer_state_dtype",
             f"only applies to Adam, but OPTIMIZER={self.optimizer}",
             "set OPTIMIZER_STATE_DTYPE=fp32, or OPTIMIZER=adam"),
            *((is_bf16 and optimizer.has_bf16 and getattr(self, name) > _LARGEST_BF16_BETA, name,
               "is too close to 1 for OPTIMIZER_STATE_DTYPE=bf16: rounding would keep moments from decaying",
               f"set {name.upper()} to at most {_LARGEST_BF16_BETA:.3f}, or OPTIMIZER_STATE_DTYPE=fp32")
              for name in ("adam_beta1", "adam_beta2")),
            (is_deepep and self.dtype != "bf16", "dispatcher",
             f"requires DTYPE=bf16, not {self.dtype}", "set DTYPE=bf16 or DISPATCHER=alltoall"),
            # deepseek-ai/DeepEP issue 589: PyTorch then fills new tensors on a different stream from the one
            # that DeepEP writes on.
            (is_deepep and self.deterministic, "dispatcher",
             "DeepEP may return NaN with DETERMINISTIC=true",
             "set DISPATCHER=alltoall, or DETERMINISTIC=false"),
        )  # fmt: skip

    def _expert_backend_problems(self) -> Iterator[str]:
        backend = EXPERT_BACKENDS.get(self.expert_backend, ExpertBackend())  # auto selects a suitable one
        if backend.dtypes and self.dtype not in backend.dtypes:
            rule = f"only supports DTYPE={' and '.join(backend.dtypes)}, not {self.dtype}"
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
                rule = (
                    f"EXPERT_BACKEND={self.expert_backend} requires row sizes divisible by {row_bytes} bytes"
                )
                sizes = multiples(row_bytes // num_bytes * ways, value)
                fix = f"set {name.upper()} to {sizes}, or EXPERT_BACKEND=loop"
                yield problem(name, value, f"{rule}, but a row has {row} values of type {self.dtype}", fix)
