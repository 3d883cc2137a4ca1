"""Rules for rotary embeddings in a config.json: one embedding for all layers, or one per kind of layer."""

import math
from typing import Any

from moe_exp.checkpoint.hf import fields as rules
from moe_exp.checkpoint.hf.fields import FieldRule, Fields, Settings, UnsupportedModel, given, refuse
from moe_exp.config import Config
from moe_exp.config.setting_types import layers_of_pattern, pattern_of

# Rotary embedding: transformers 4 has `rope_theta` and the dictionary `rope_scaling`, transformers 5 has the
# dictionary `rope_parameters` for both. Serving software may read either form, so both are read and written.
_LLAMA3_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fixed in Megatron, like the length 8192
_SCALED = {"factor", "original_max_position_embeddings"}
_YARN = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"}
_KNOWN = {"default": set[str](), "llama3": _SCALED | {*_LLAMA3_FACTORS}, "yarn": _SCALED | _YARN}


def rope(
    theta: float, *, fraction: float | None = None, stretches: bool = False, default: Fields | None = None
) -> FieldRule:
    """Rule for the rotary embedding. `theta` is the default base; `fraction` is the default fraction of a
    head that is rotated. If `fraction` is None, only 1 is allowed. `default` replaces `rope_parameters` if
    both `rope_parameters` and `rope_scaling` are missing.
    `stretches`: whether `alpha` scales the base if the type is `dynamic` (Hunyuan).
    """
    whole = fraction is None

    def read(fields: Fields) -> Settings:
        merged: dict[str, Any] = {}
        for name, usual in (("rope_scaling", {}), ("rope_parameters", default or {})):
            values = given(fields, name, usual)
            if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
                raise refuse(name, values, "all layers must have the same rotary embedding")
            merged = merged or dict(values)  # transformers uses one of the two, not both
        for name in ("rope_theta", "partial_rotary_factor"):
            if fields.get(name) is not None:
                merged.setdefault(name, fields[name])
        partial = "partial_rotary_factor"
        if not whole and (merged if partial in merged else fields).get(partial, fraction) is None:
            raise refuse(partial, "null", "must be a number", f"omit it to use {fraction}")
        if merged.get("truncate", True) is None:  # transformers: false
            merged["truncate"] = False
        # older config.json files use `type`
        kind = merged.pop("rope_type", None) or merged.get("type", "default")
        merged.pop("type", None)
        if stretches and kind == "dynamic" and merged.get("alpha"):
            size, kind = given(fields, "head_dim"), "default"
            merged = {"rope_theta": merged.get("rope_theta", theta) * merged["alpha"] ** (size / (size - 2))}
        merged = {name: value for name, value in merged.items() if value is not None} | {"rope_type": kind}
        settings = {"rotary_base": float(merged.pop("rope_theta", theta))}
        found = merged.pop("partial_rotary_factor", fraction or 1.0)
        if found != 1 and whole:
            rule = "must be 1.0, as transformers rotates whole heads in this architecture"
            raise refuse("partial_rotary_factor", found, rule, "set this field to 1.0")
        return settings | {"rotary_fraction": found} | _read_scaling(merged, fields)

    def write(config: Config) -> dict[str, Any]:
        scaling: dict[str, Any] = {}
        if config.rope_scaling not in ("none", "llama3", "yarn"):
            rule = "config.json cannot express this scaling. Fix: set none, llama3 or yarn"
            raise UnsupportedModel(f"ROPE_SCALING={config.rope_scaling}: {rule}.")
        if config.rope_scaling != "none":
            scaling["factor"] = config.rope_scaling_factor
            scaling["original_max_position_embeddings"] = config.rope_seq_len
        if config.rope_scaling == "llama3":
            scaling |= _LLAMA3_FACTORS
        if config.rope_scaling == "yarn":
            scaling |= {"beta_fast": config.yarn_beta_fast, "beta_slow": config.yarn_beta_slow}
            if config.yarn_mscale_all_dim:
                scaling |= {"mscale": config.yarn_mscale, "mscale_all_dim": config.yarn_mscale_all_dim}
            scaling |= {} if config.yarn_truncate else {"truncate": False}
        kind = {"rope_type": config.rope_scaling if scaling else "default"}
        turned = {} if whole else {"partial_rotary_factor": config.rotary_fraction}
        return {
            "rope_theta": config.rotary_base,
            "rope_scaling": (kind | {"type": config.rope_scaling} | scaling) if scaling else None,
            "rope_parameters": kind | {"rope_theta": config.rotary_base} | scaling | turned,
            **turned,
        }

    names = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    return FieldRule(names, read, write, {} if whole else {"rotates_whole_heads": rules.EITHER})


# MiniMax: another field for the rotated part of a head, without effect beside partial_rotary_factor
@rules.field_rule("rotary_dim", write=lambda c: {"rotary_dim": int(c.kv_channels * c.rotary_fraction)})
def rotated_channels(fields: Fields) -> Settings:
    ropes = [given(fields, name, {}) for name in ("rope_scaling", "rope_parameters")]
    if (rotated := given(fields, "rotary_dim", 0)) and not any(
        one.get("partial_rotary_factor") is not None for one in (fields, *ropes)
    ):
        return {"rotary_fraction": rotated / given(fields, "head_dim")}
    return {}


def _read_scaling(merged: dict[str, Any], fields: Fields) -> Settings:
    kind = merged.pop("rope_type")
    if kind not in _KNOWN:
        raise refuse("rope_type", kind, f"must be one of {', '.join(_KNOWN)}")
    if unknown := sorted(set(merged) - _KNOWN[kind] - {"original_max_position_embeddings"}):
        raise refuse(unknown[0], merged[unknown[0]], f"is unknown for rope_type={kind}")
    if kind == "default":
        return {"rope_scaling": "none"}
    original = merged.get("original_max_position_embeddings", given(fields, "max_position_embeddings"))
    if kind == "llama3":
        for name, value in (*_LLAMA3_FACTORS.items(), ("original_max_position_embeddings", 8192)):
            if (found := merged.get(name, original)) != value:
                raise refuse(name, found, f"must be {value}, as in Megatron's Llama 3 scaling")
        return {"rope_scaling": "llama3", "rope_scaling_factor": given(merged, "factor")}
    factor = {"rope_scaling_factor": given(merged, "factor"), "rope_original_seq_len": original}
    betas = {name: merged.get(f"beta_{name}", usual) for name, usual in (("fast", 32.0), ("slow", 1.0))}
    settings = {f"yarn_beta_{name}": value for name, value in betas.items()}
    settings["yarn_truncate"] = bool(merged.get("truncate", True))
    mscale, all_dim = merged.get("mscale", 0), merged.get("mscale_all_dim", 0)
    if all_dim and not mscale:
        raise refuse("mscale", mscale, f"is required with mscale_all_dim={all_dim} in Megatron's YaRN")
    computed = [0.1 * number * math.log(merged["factor"]) + 1 for number in (mscale, all_dim, 1)]
    attention_factor = computed[0] / computed[1] if all_dim else computed[2]
    if abs((found := merged.get("attention_factor", attention_factor)) - attention_factor) > 1e-6:
        raise refuse("attention_factor", found, f"must be {attention_factor}, as Megatron's YaRN computes it")
    # transformers ignores the two unless both are set.
    scales = {"yarn_mscale": mscale if all_dim else 1.0, "yarn_mscale_all_dim": all_dim or 0.0}
    return {"rope_scaling": "yarn"} | factor | settings | scales


def rope_by_kind(
    windows: FieldRule, *, full: float, windowed: float, legacy: bool, fraction: float | None = None
) -> FieldRule:
    """Rule for two rotary embeddings: for layers with a window and for layers without.

    Args:
        windows: the model class's rule for windows.
        full, windowed: default bases for layers without and with a window.
        fraction: see `rope`; must be the same in all layers.
        legacy: whether `rope_theta` and `rope_scaling` apply to layers without a window (OLMo 3). If false,
            transformers ignores these fields, and they are refused as unknown.
    """
    flat, name = rope(full, fraction=fraction), "rope_parameters"
    old = ("rope_theta", "rope_scaling")

    def read(fields: Fields) -> Settings:
        both, of_windows = given(fields, name, {}), windows.read(fields)
        old_form = {key: fields[key] for key in old if fields.get(key) is not None}
        if both.keys() - {rules.FULL, rules.WINDOWED} or (both and old_form):
            kinds = f"{rules.FULL} and {rules.WINDOWED}"
            rule = f"transformers only reads {kinds} in it, and no older rope fields"
            raise refuse(name, both, rule, "correct the config.json")
        if old_form:
            scaling = old_form.pop("rope_scaling", {})  # its rope_theta has priority, its `type` no effect
            both = {rules.FULL: {"rope_type": "default"} | old_form | scaling}
        of_full, of_windowed = (
            flat.read({**fields, **dict.fromkeys(old), name: both.get(kind) or {"rope_theta": base}})
            for kind, base in ((rules.FULL, full), (rules.WINDOWED, windowed))
        )
        if not (of_full.get("yarn_truncate", True) and of_windowed.get("yarn_truncate", True)):
            raise refuse("truncate", False, f"transformers ignores it if {name} is per kind of layer")
        if not of_windows["sliding_window"] or of_full == of_windowed:
            return of_full
        if of_windows["window_pattern"] == "1":
            return of_windowed
        if (found := of_windowed["rope_scaling"]) != "none":
            rule = f"must be default or equal to that of {rules.FULL}"
            raise refuse(f"rope_type of {rules.WINDOWED}", found, rule)
        if (found := of_windowed["rotary_fraction"]) != of_full["rotary_fraction"]:
            raise refuse(f"partial_rotary_factor of {rules.WINDOWED}", found, f"must be that of {rules.FULL}")
        return of_full | {"window_rotary_base": of_windowed["rotary_base"]}

    def write(config: Config) -> dict[str, Any]:
        if not config.yarn_truncate:
            rule = "transformers ignores it if rotary embeddings depend on the kind of layer"
            raise UnsupportedModel(f"YARN_TRUNCATE=False: {rule}. Fix: set YARN_TRUNCATE=true.")
        of_windows = of_full = flat.write(config)[name]
        if config.window_rotary_base:
            turned = {key: of_full[key] for key in of_full if key == "partial_rotary_factor"}
            of_windows = {"rope_type": "default", "rope_theta": config.window_rotary_base} | turned
        return {name: {rules.FULL: of_full, rules.WINDOWED: of_windows}}

    traits = {**flat.traits, "window_base": ("none", "plain", "beside scaling")}
    return FieldRule((name, *(old if legacy else ())), read, write, traits)


def rope_by_layer(windows: FieldRule, theta: float) -> FieldRule:
    """Rule for `layer_rope_theta` (GraniteMoeSWA): each layer's rotary base; 0 means no rotary embedding."""
    flat, name = rope(theta), "layer_rope_theta"

    def read(fields: Fields) -> Settings:
        settings, of_windows = flat.read(fields), windows.read(fields)
        layers = given(fields, "num_hidden_layers")
        bases = given(fields, name, [settings["rotary_base"]] * layers)
        if len(bases) != layers:
            raise refuse(name, bases, f"must have {layers} values, as many as layers")
        has_window = layers_of_pattern(of_windows["window_pattern"], layers, 0)
        kinds: tuple[set[float], set[float]] = set(), set()  # bases without a window, with one
        for base, windowed in zip(bases, has_window, strict=True):
            kinds[windowed and of_windows["sliding_window"] > 0].update([base] if base else [])
        full, windowed_ones = kinds
        if max(map(len, kinds)) > 1 or (settings["rope_scaling"] != "none" and len(full | windowed_ones) > 1):
            rule = "must be one base for layers with a window and one for layers without"
            raise refuse(name, bases, f"{rule}, equal with rope scaling")
        if full and windowed_ones - full:
            settings["window_rotary_base"] = float(*windowed_ones)
        rotary_layers = pattern_of([base != 0 for base in bases])
        base = min(full or windowed_ones or {settings["rotary_base"]})
        return settings | {"rotary_base": float(base), "rotary_layers": rotary_layers}

    def write(config: Config) -> dict[str, Any]:
        of_windows = config.window_rotary_base or config.rotary_base
        layers = zip(config.window_layers, config.layers_without_rotary, strict=True)
        bases = [
            0 if lacks_it else of_windows if windowed else config.rotary_base for windowed, lacks_it in layers
        ]
        return flat.write(config) | {name: bases}

    return FieldRule((*flat.names, name), read, write, {"window_base": ("none", "plain")})


def rotates(layer: int, fields: Fields) -> bool:
    """Whether a SmolLM3 layer has a rotary embedding. Despite its name, `no_rope_layers` lists 1 for yes."""
    listed = given(fields, "no_rope_layers", None)
    return bool(listed[layer] if listed else (layer + 1) % given(fields, "no_rope_layer_interval"))


@rules.field_rule(
    "no_rope_layers",
    "no_rope_layer_interval",
    write=lambda c: {"no_rope_layers": [int(not lacks_it) for lacks_it in c.layers_without_rotary]},
)
def layers_without_rope(fields: Fields) -> Settings:
    layers = range(given(fields, "num_hidden_layers"))
    return {"rotary_layers": pattern_of([rotates(layer, fields) for layer in layers])}
