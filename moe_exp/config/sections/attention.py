"""Attention settings: visible tokens, sinks, soft cap, output gate and backend."""

from collections.abc import Iterator
from typing import Literal

from moe_exp.config.sections.model import ModelSettings
from moe_exp.config.setting_types import LayerPattern, LayersOrWindowed, NonNegative, OptionalWidth, Rate
from moe_exp.config.traits import model, numerics


class AttentionSettings(ModelSettings):
    """Further settings of the section Model."""

    sliding_window: NonNegative = model(
        0,
        "size of the attention window in the layers of WINDOW_PATTERN (tokens, including the query itself); "
        "0: no window",
    )
    window_pattern: LayerPattern = model(
        "1",
        "which layers use SLIDING_WINDOW: a number such as 2 (every second layer, beginning with the first, "
        "as in gpt-oss), a ratio such as 5:1 (five layers with a window, then one without, repeated), or a "
        "list of 1 (window) and 0, as in MOE_LAYER_FREQ",
    )
    rotary_layers: LayersOrWindowed = numerics(
        "1",
        "layers with rotary position embedding: a pattern as in WINDOW_PATTERN (1: all layers), or windowed "
        "(only layers with SLIDING_WINDOW)",
    )
    window_rotary_base: Rate = numerics(
        0.0,
        "rotary base of layers with SLIDING_WINDOW; if it is set, these layers ignore ROPE_SCALING; 0: all "
        "layers have the same rotary embedding",
    )
    window_query_groups: NonNegative = model(
        0, "key/value heads of layers with SLIDING_WINDOW (MiMo-V2-Flash); 0: same as NUM_QUERY_GROUPS"
    )
    value_head_dim: OptionalWidth = numerics(
        0,
        "channels of each value head, if fewer than in a query/key head (MiMo-V2-Flash); value heads are "
        "padded with zero weights to the size of a query/key head; 0: as many as in a query/key head",
    )
    value_scale: float = numerics(1.0, "factor applied to values (MiMo-V2-Flash)", gt=0)
    attention_sinks: Literal["none", "all", "windowed"] = model(
        "none",
        "layers with attention sinks (gpt-oss): in the softmax, each head has an extra learned logit that "
        "belongs to no token; windowed: only layers with SLIDING_WINDOW",
    )
    attention_softcap: Rate = numerics(
        0.0, "soft cap c of attention logits, c * tanh(logit / c) (Gemma 2); 0: none"
    )
    attention_gate: bool = model(
        False,
        "before the output projection, multiply the attention output by a gate: the sigmoid of a "
        "projection of the attention input (Qwen3-Next, Afmoe)",
    )
    attention_backend: Literal["auto", "sdpa", "flash-attn", "flex", "blocks"] = model(
        "auto",
        "implementation of attention; sdpa: torch's scaled_dot_product_attention; flex: torch's "
        "FlexAttention, on GPUs; blocks: plain torch, one block of queries at a time; auto: the fastest that "
        "supports the model",
        compared=False,
    )

    @property
    def window_layers(self) -> list[bool]:
        """Tells which layers have a window. If WINDOW_PATTERN is a list, the result has its length."""
        return self.layers_in(self.window_pattern) if self.sliding_window else [False] * self.num_layers

    @property
    def layers_without_rotary(self) -> list[bool]:
        """Tells which layers lack rotary position embedding."""
        if self.rotary_layers == "windowed":
            return [not has_window for has_window in self.window_layers]
        return [not is_in for is_in in self.layers_in(self.rotary_layers)]

    @property
    def sink_layers(self) -> list[bool]:
        """Tells which layers have attention sinks."""
        windowed, which = self.window_layers, self.attention_sinks
        return windowed if which == "windowed" else [which == "all"] * len(windowed)

    @property
    def layer_query_groups(self) -> list[int]:
        """Number of key/value heads of each layer."""
        groups = (self.num_query_groups, self.window_query_groups or self.num_query_groups)
        return [groups[has_window] for has_window in self.window_layers]

    @property
    def has_equal_attention(self) -> bool:
        """Whether the attention parameters have the same shapes in all layers."""
        return len({*zip(self.layer_query_groups, self.sink_layers, strict=True)}) == 1

    @property
    def needs_own_attention(self) -> bool:
        """Whether the settings rule out Transformer Engine's core attention."""
        beyond = self.attention_sinks != "none" or self.attention_softcap or self.attention_backend != "auto"
        return bool(self.sliding_window or beyond or self.value_scale != 1)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        names = ("window_pattern", "window_rotary_base", "window_query_groups")
        yield from self.without_effect("sliding_window", names)
        for name, usual in (("rotary_layers", "1"), ("attention_sinks", "none")):
            if getattr(self, name) == "windowed" and not self.sliding_window:
                rule = "no layer has a window while SLIDING_WINDOW=0"
                yield self.problem(name, rule, f"set SLIDING_WINDOW, or {name.upper()}={usual}")
        patterns = {"window_pattern": self.window_layers, "rotary_layers": self.layers_without_rotary}
        for name, layers in patterns.items():
            if getattr(self, name) != "windowed":
                yield from self.pattern_problems(name, layers)
        latent, lacks_rotary = self.multi_latent_attention, any(self.layers_without_rotary)
        name = "rotary_layers" if lacks_rotary else "window_rotary_base"
        by_blocks = self.sliding_window or self.attention_sinks != "none" or self.attention_softcap
        backend = self.attention_backend
        yield from self.broken(
            ((lacks_rotary or self.window_rotary_base) and latent, name,
             "with MULTI_LATENT_ATTENTION, all layers have the same rotary embedding",
             "set ROTARY_LAYERS=1 and WINDOW_ROTARY_BASE=0"),
            (self.window_query_groups and latent, "window_query_groups",
             "MULTI_LATENT_ATTENTION has no key/value heads", "set WINDOW_QUERY_GROUPS=0"),
            (self.window_query_groups and self.num_heads % self.window_query_groups, "window_query_groups",
             f"must divide NUM_HEADS={self.num_heads}", "set WINDOW_QUERY_GROUPS=0"),
            (self.value_head_dim and latent, "value_head_dim", "MULTI_LATENT_ATTENTION uses V_HEAD_DIM",
             "set VALUE_HEAD_DIM=0"),
            (self.value_head_dim > self.kv_channels, "value_head_dim",
             f"must be at most the head size {self.kv_channels}", "set VALUE_HEAD_DIM=0"),
            (self.attention_gate and latent, "attention_gate",
             "Megatron's MULTI_LATENT_ATTENTION has no output gate", "set ATTENTION_GATE=false"),
            (by_blocks and self.attention_dropout, "attention_dropout",
             "cannot be combined with SLIDING_WINDOW, ATTENTION_SINKS or ATTENTION_SOFTCAP",
             "set ATTENTION_DROPOUT=0"),
            (backend in ("flex", "blocks") and self.attention_dropout, "attention_dropout",
             f"cannot be combined with ATTENTION_BACKEND={backend}", "set ATTENTION_DROPOUT=0"),
            (backend in ("sdpa", "flash-attn") and (self.attention_sinks != "none" or self.attention_softcap),
             "attention_backend", "supports neither ATTENTION_SINKS nor ATTENTION_SOFTCAP",
             "set ATTENTION_BACKEND=auto"),
            (bool(self.mtp_num_layers) and (self.sliding_window or lacks_rotary), "mtp_num_layers",
             "cannot be combined with SLIDING_WINDOW or ROTARY_LAYERS, whose patterns do not cover MTP "
             "layers", "set MTP_NUM_LAYERS=0"),
        )  # fmt: skip
