"""The rotary embedding in a config.json, in both of its formats.

Up to transformers 4: `rope_theta` beside `rope_scaling`, a dictionary with the kind under `type` or
`rope_type`, or null. Since 5: `rope_parameters`, one dictionary with both. Both are read and written, as
serving software reads one or the other.
"""

from __future__ import annotations

from typing import Any

from moe_exp.checkpoint.hf.fields import FieldRule, Fields, Settings, UnsupportedModel, given, refuse
from moe_exp.config import Config

_LLAMA3_SEQ_LEN = 8192
_LLAMA3_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # built into Megatron
_SCALED = {"factor", "original_max_position_embeddings"}
_YARN = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"}
_KNOWN = {"default": set[str](), "llama3": _SCALED | {*_LLAMA3_FACTORS}, "yarn": _SCALED | _YARN}
_NAMES = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def rope(theta: float, *, fraction: float | None = None) -> FieldRule:
    """Rule for the rotary embedding with default base `theta` and rotated `fraction` (None: always 1)."""
    whole = fraction is None

    def read(fields: Fields) -> Settings:
        merged = _merged(fields)
        settings = {"rotary_base": float(merged.pop("rope_theta", theta))}
        found = merged.pop("partial_rotary_factor", fraction or 1.0)
        if found != 1 and whole:
            rule = "transformers turns whole heads in this architecture"
            raise refuse("partial_rotary_factor", found, rule, "set it to 1.0")
        return settings | {"rotary_fraction": found} | _read_scaling(merged, fields)

    def write(config: Config) -> dict[str, Any]:
        scaling = _written_scaling(config)
        kind = {"rope_type": config.rope_scaling if scaling else "default"}
        turned = {} if whole else {"partial_rotary_factor": config.rotary_fraction}
        return {
            "rope_theta": config.rotary_base,
            "rope_scaling": (kind | {"type": config.rope_scaling} | scaling) if scaling else None,
            "rope_parameters": kind | {"rope_theta": config.rotary_base} | scaling | turned,
            **turned,
        }

    return FieldRule(_NAMES, read, write)


def _merged(fields: Fields) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        values = given(fields, name, {})
        if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
            raise refuse(name, values, "one rotary embedding for all layers is supported")
        merged |= values
    for name in ("rope_theta", "partial_rotary_factor"):
        if fields.get(name) is not None:
            merged.setdefault(name, fields[name])
    kind = merged.pop("rope_type", None) or merged.get("type", "default")
    merged.pop("type", None)
    return {name: value for name, value in merged.items() if value is not None} | {"rope_type": kind}


def _read_scaling(merged: dict[str, Any], fields: Fields) -> Settings:
    kind = merged.pop("rope_type")
    if kind not in _KNOWN:
        raise refuse("rope_type", kind, f"Megatron has {', '.join(_KNOWN)}")
    if unknown := sorted(set(merged) - _KNOWN[kind] - {"original_max_position_embeddings"}):
        rule = f"is unknown for the rotary embedding {kind}"
        raise refuse(unknown[0], merged[unknown[0]], rule)
    if kind == "default":
        return {"rope_scaling": "none"}
    original = merged.get("original_max_position_embeddings", given(fields, "max_position_embeddings"))
    if kind == "llama3":
        for name, value in (*_LLAMA3_FACTORS.items(), ("original_max_position_embeddings", _LLAMA3_SEQ_LEN)):
            if (found := merged.get(name, original)) != value:
                raise refuse(name, found, f"Megatron's Llama 3 scaling has {value}")
        return {"rope_scaling": "llama3", "rope_scaling_factor": given(merged, "factor")}
    factor = {"rope_scaling_factor": given(merged, "factor"), "rope_original_seq_len": original}
    betas = {name: merged.get(f"beta_{name}", usual) for name, usual in (("fast", 32.0), ("slow", 1.0))}
    settings = {f"yarn_beta_{name}": value for name, value in betas.items()}
    return {"rope_scaling": "yarn"} | factor | settings | _read_mscale(merged)


def _read_mscale(merged: dict[str, Any]) -> Settings:
    for name, usual in (("attention_factor", None), ("truncate", True)):
        if merged.get(name, usual) != usual:
            raise refuse(name, merged[name], "Megatron's YaRN has no such setting")
    mscale, all_dim = merged.get("mscale", 0), merged.get("mscale_all_dim", 0)
    if all_dim and not mscale:
        raise refuse("mscale", mscale, f"with mscale_all_dim={all_dim} Megatron's YaRN needs both")
    # transformers reads the two only where both are there.
    return {"yarn_mscale": mscale if all_dim else 1.0, "yarn_mscale_all_dim": all_dim or 0.0}


def yarn_is_expressible(config: Config) -> bool:
    """Whether transformers can express this YaRN: both mscale factors, or neither."""
    if config.rope_scaling != "yarn":
        return True
    return config.yarn_mscale > 0 if config.yarn_mscale_all_dim else config.yarn_mscale == 1


def _written_scaling(config: Config) -> dict[str, Any]:
    if config.rope_scaling == "none":
        return {}
    factor, length = config.rope_scaling_factor, config.rope_seq_len
    scaling: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": length}
    if config.rope_scaling == "llama3":
        return scaling | _LLAMA3_FACTORS
    if config.rope_scaling != "yarn":
        rule = "has no form in config.json. Fix: use none, llama3 or yarn"
        raise UnsupportedModel(f"ROPE_SCALING={config.rope_scaling}: {rule}.")
    scaling |= {"beta_fast": config.yarn_beta_fast, "beta_slow": config.yarn_beta_slow}
    if config.yarn_mscale_all_dim:
        scaling |= {"mscale": config.yarn_mscale, "mscale_all_dim": config.yarn_mscale_all_dim}
    return scaling
