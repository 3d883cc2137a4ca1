"""Settings that FP8 requires; machine requirements: launch/machine_checks.py and layers/experts/fp8.py."""

from __future__ import annotations

from collections.abc import Iterator

from moe_exp.config.checks.divisors import multiples
from moe_exp.config.settings import Config, problem

SIZE_MULTIPLES = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}


def check_fp8(c: Config) -> Iterator[str]:
    """Experts compute in FP8 with our kernels or Transformer Engine, whose sizes are multiples of 16/32."""
    if c.fp8 == "none":
        return
    if c.is_fp8_by_kernels and (c.fp8, c.fp8_recipe) != ("e4m3", "blockwise"):
        rule = f"with FP8_RECIPE={c.fp8_recipe} is not computed by EXPERT_BACKEND=triton"
        yield problem("fp8", c.fp8, rule, "set FP8=e4m3 FP8_RECIPE=blockwise, or EXPERT_BACKEND=te")
    elif c.use_moe and c.expert_backend not in ("te", "triton"):
        rule = f"experts compute in FP8 with EXPERT_BACKEND=te or triton, not with {c.expert_backend}"
        yield problem("fp8", c.fp8, rule, "set EXPERT_BACKEND=te, or FP8=none")
    if not c.use_moe and c.impl == "local":
        yield problem(
            "fp8", c.fp8, "has no effect in a dense model with IMPL=local", "set IMPL=te, or FP8=none"
        )
    if c.dtype != "bf16":
        yield problem(
            "fp8",
            c.fp8,
            f"is for the products of a model in bf16, but DTYPE={c.dtype}",
            "set DTYPE=bf16, or FP8=none",
        )
    if c.is_fp8_by_kernels:
        return
    multiple = SIZE_MULTIPLES[c.fp8_recipe]
    if c.impl != "local" and (tokens := c.seq_len * c.mbsz // (c.cp * c.tp)) % multiple:
        rule = (
            f"with MBSZ={c.mbsz} a rank multiplies {tokens} tokens, FP8_RECIPE={c.fp8_recipe} wants a"
            f" multiple of {multiple}"
        )
        yield problem("seq_len", c.seq_len, rule, "change SEQ_LEN or MBSZ, or set FP8=none")
    for name, value, ways in _sizes(c):
        if value % (multiple * ways):
            rule = f"FP8_RECIPE={c.fp8_recipe} multiplies matrices whose sizes are multiples of {multiple}"
            yield problem(
                name,
                value,
                rule + (f" on each of {ways} ranks" if ways > 1 else ""),
                _fix(name, multiple * ways, value),
            )


def _sizes(c: Config) -> Iterator[tuple[str, int, int]]:
    """(setting, value, ranks that it is split over) for the dimensions of FP8 GEMMs."""
    yield "hidden_size", c.hidden_size, 1
    if c.use_moe and c.moe_latent_size:
        yield "moe_latent_size", c.moe_latent_size, 1
    if c.use_moe:
        yield "moe_ffn_hidden_size" if c.moe_ffn_hidden_size else "ffn_hidden_size", c.expert_ffn_size, c.etp
    if not all(c.moe_layers) and c.impl != "local" and (c.moe_ffn_hidden_size or not c.use_moe):
        yield "ffn_hidden_size", c.ffn_hidden_size, c.tp


def _fix(name: str, multiple: int, value: int) -> str:
    return f"set {name.upper()} to {multiples(multiple, value)}, or FP8=none"
