"""What DETERMINISTIC, the same bits in every start on the same GPUs, software and layout, asks of the
environment. No torch.

The variables are those that Megatron-LM's --deterministic-mode sets (megatron/training/determinism.py).
`engine/runtime.py` switches torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moe_exp.config.settings import Config, problem

# Variables that CUDA's libraries read once, when they start, to the values with which they add up in one
# order. The first is ours. NCCL has other algorithms that are repeatable, but in which order a tree adds up
# is the topology's choice and not ours to promise.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring",),
    # Megatron's attention by Transformer Engine refuses to be built without it
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


def deterministic_environment(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that `environ` lacks for DETERMINISTIC; none without it."""
    return (
        {name: values[0] for name, values in ENVIRONMENT.items() if not environ.get(name)}
        if config.deterministic
        else {}
    )


def environment_problems(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Variables of `environ` with which DETERMINISTIC would not hold."""
    for name, values in ENVIRONMENT.items() if config.deterministic else ():
        if (value := environ.get(name)) and value not in values:
            fix = f"unset {name}, or set {name}={' or '.join(values)}, or DETERMINISTIC=false"
            yield problem(name, value, "DETERMINISTIC=true needs sums in one order", fix)
