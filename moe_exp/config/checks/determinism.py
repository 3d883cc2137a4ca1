"""Environment variables for DETERMINISTIC: identical bits in every start on equal GPUs, software and layout.

They are those of Megatron-LM's --deterministic-mode (megatron/training/determinism.py). `engine/runtime.py`
configures torch. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moe_exp.config.settings import Config, problem

# Variables that CUDA's libraries read at start, and values with a fixed order of summation; the first is our
# default. Other NCCL algorithms are repeatable, too, but a tree's order depends on the topology.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring",),
    # required by Megatron's Transformer Engine attention
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


def deterministic_environment(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that DETERMINISTIC needs and `environ` lacks."""
    return (
        {name: values[0] for name, values in ENVIRONMENT.items() if not environ.get(name)}
        if config.deterministic
        else {}
    )


def environment_problems(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Variables of `environ` that conflict with DETERMINISTIC."""
    for name, values in ENVIRONMENT.items() if config.deterministic else ():
        if (value := environ.get(name)) and value not in values:
            fix = f"unset {name}, or set {name}={' or '.join(values)}, or DETERMINISTIC=false"
            yield problem(name, value, "DETERMINISTIC=true needs sums in one order", fix)
