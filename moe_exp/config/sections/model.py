"""Model settings apart from the experts: layers, attention, position embedding, initial weights, muP."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from moe_exp.config.choices import MUP_RULES, one_of
from moe_exp.config.errors import multiples, problem
from moe_exp.config.sections.launch import LaunchSettings
from moe_exp.config.setting_types import (
    FewLayers,
    NonNegative,
    NumHeads,
    NumLayers,
    OptionalWidth,
    Positive,
    Probability,
    Rate,
    RateByIteration,
    Width,
    as_given,
    layers_of_pattern,
)
from moe_exp.config.traits import model, numerics

# Settings that cannot be combined with MULTI_LATENT_ATTENTION, and the rule that each would break.
_NOT_LATENT = {
    "head_dim": "MULTI_LATENT_ATTENTION uses QK_HEAD_DIM, QK_POS_EMB_HEAD_DIM and V_HEAD_DIM instead",
    "qk_norm_scope": "with MULTI_LATENT_ATTENTION, QK_NORM normalizes the compressed vectors, not heads",
    "qkv_bias": "Megatron's MULTI_LATENT_ATTENTION projections have no biases",
    "attention_multiplier": "Megatron's MULTI_LATENT_ATTENTION sets the scale of the scores",
    "rotary_fraction": "with MULTI_LATENT_ATTENTION, QK_POS_EMB_HEAD_DIM sets the number of rotated channels",
    "yarn_truncate": "Megatron's MULTI_LATENT_ATTENTION always rounds",
}


class ModelSettings(LaunchSettings):
    """Settings of the section Model."""

    num_layers: NumLayers = model(24, "transformer layers")
    hidden_size: Width = model(512, "model width")
    ffn_hidden_size: Width = model(1792, "width of the dense MLP")
    num_heads: NumHeads = model(4, "attention heads")
    num_query_groups: NumHeads = model(
        1, "number of key/value heads (grouped-query attention); same as NUM_HEADS: multi-head attention"
    )
    head_dim: OptionalWidth = model(0, "channels per attention head; 0: HIDDEN_SIZE / NUM_HEADS")
    multi_latent_attention: bool = model(
        False,
        "multi-head latent attention (MLA); its sizes are the settings from Q_LORA_RANK to V_HEAD_DIM, and "
        "NUM_QUERY_GROUPS is ignored",
    )
    q_lora_rank: OptionalWidth = model(0, "compressed width of queries (MLA); 0: no compression")
    kv_lora_rank: Width = model(512, "compressed width of keys and values (MLA)")
    qk_head_dim: Width = model(128, "channels without position embedding per query/key head (MLA)")
    qk_pos_emb_head_dim: Width = model(64, "channels with position embedding per query/key head (MLA)")
    v_head_dim: Width = model(128, "channels per value head (MLA)")
    seq_len: Positive = model(2048, "sequence length (tokens per sample)")
    vocab_size: Positive = model(
        128256,
        "vocabulary size before padding to a multiple of 128; if not set, taken from the data or TOKENIZER "
        "where possible",
    )
    activation: Literal["swiglu", "clamped_swiglu", "geglu", "gelu", "squared_relu"] = model(
        "swiglu", "activation function of MLPs and experts; clamped_swiglu: inputs clamped to 7 (gpt-oss)"
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = model("RMSNorm", "type of the norm layers")
    norm_epsilon: float = numerics(1e-05, "epsilon added to the variance in norm layers", gt=0)
    norm_bias: bool = model(True, "biases in norm layers (only for NORMALIZATION=LayerNorm)")
    norm_placement: Literal["pre", "post", "around", "around_moe", "parallel"] = model(
        "pre",
        "placement of norms; pre: before attention and MLP; post: after both (OLMo 2); around: before and "
        "after both (Afmoe); around_moe: before both, and after the MLP if it is an MoE (A.X K1); parallel: "
        "one norm before attention and MLP, which run in parallel (Cohere2)",
    )
    add_bias_linear: bool = model(False, "biases in all linear layers, including experts and router")
    qk_norm: bool = model(False, "normalize queries and keys; with MLA, normalize their compressed vectors")
    qk_norm_scope: Literal["head", "all", "rotated"] = model(
        "head",
        "what QK_NORM normalizes; head: each head; all: all heads together (OLMo 2, OLMoE); rotated: each "
        "head after the rotary embedding (Hunyuan)",
    )
    qk_norm_epsilon: Rate = numerics(0.0, "epsilon of the QK_NORM norms; 0: same as NORM_EPSILON")
    qkv_bias: bool = model(False, "biases in the query, key and value projections only")
    rotary_base: float = numerics(100000.0, "base of the rotary position embedding", gt=0)
    rotary_fraction: float = model(1.0, "fraction of each head's channels that is rotated", gt=0, le=1)
    rope_scaling: Literal["none", "llama3", "yarn"] = model(
        "none", "scaling of rotary frequencies for sequences longer than ROPE_ORIGINAL_SEQ_LEN"
    )
    rope_scaling_factor: float = model(1.0, "factor by which ROPE_SCALING extends the sequence length", ge=1)
    rope_original_seq_len: NonNegative = model(
        0,
        "sequence length before scaling (tokens; llama3 only accepts 8192); 0: 4096 for yarn, 8192 for "
        "llama3",
    )
    yarn_beta_fast: float = model(
        32.0,
        "ROPE_SCALING=yarn does not scale frequencies that make at least this many rotations in "
        "ROPE_ORIGINAL_SEQ_LEN tokens",
        gt=0,
    )
    yarn_beta_slow: float = model(
        1.0,
        "frequencies with at most this many rotations over ROPE_ORIGINAL_SEQ_LEN are divided by "
        "ROPE_SCALING_FACTOR (yarn)",
        gt=0,
    )
    yarn_mscale: Rate = model(
        1.0,
        "queries and keys are scaled by f(YARN_MSCALE) / f(YARN_MSCALE_ALL_DIM), where f(m) = 1 + "
        "0.1*m*ln(ROPE_SCALING_FACTOR) (yarn)",
    )
    yarn_mscale_all_dim: Rate = model(
        0.0,
        "see YARN_MSCALE, which also defines f; with MULTI_LATENT_ATTENTION, yarn also scales attention "
        "scores by f(YARN_MSCALE_ALL_DIM)^2",
    )
    yarn_truncate: bool = model(
        True,
        "round to integers the channel indices that correspond to exactly YARN_BETA_SLOW and "
        "YARN_BETA_FAST rotations (yarn)",
    )
    tie_embeddings: bool = model(False, "share weights between the embedding and the output layer")
    embedding_multiplier: float = numerics(1.0, "factor applied to the embeddings (Granite)", gt=0)
    residual_multiplier: float = numerics(
        1.0, "factor on attention and MLP outputs before residual addition (Granite)", gt=0
    )
    attention_multiplier: Rate = numerics(
        0.0, "factor applied to attention scores before softmax (Granite); 0: 1 / sqrt(channels per head)"
    )
    logits_scaling: float = numerics(1.0, "divisor of the output logits (Granite)", gt=0)
    mtp_num_layers: FewLayers = model(
        0,
        "number of multi-token prediction layers after the last layer (DeepSeek-V3), used only in training: "
        "layer k predicts the token that is k + 1 positions ahead",
    )
    mtp_loss_coeff: RateByIteration = numerics(
        0.3,
        "coefficient of the multi-token prediction loss (mean over MTP_NUM_LAYERS): a number, or a schedule "
        "such as 0.3:70%,0.1 (0.3 for 70% of the iterations, then 0.1) or 0.3:5000,0.1 (for 5000 iterations)",
    )
    dropout: Probability = model(0.0, "dropout probability after attention, MLPs and the embedding")
    attention_dropout: Probability = model(0.0, "dropout probability of attention weights")
    init_std: float = numerics(0.02, "standard deviation of the initial weights", gt=0)
    init_distribution: Literal["normal", "truncated_normal"] = numerics(
        "normal", "distribution of the initial weights; truncated_normal: cut off at 3 standard deviations"
    )
    parametrization: Literal["standard", "mup"] = numerics(
        "standard",
        "how initial weights, learning rates and weight decay scale with model size; mup: a learning rate "
        "tuned on a small model transfers to a larger one",
    )
    mup_base_hidden_size: NonNegative = numerics(
        0, "HIDDEN_SIZE of the base model on which LR and INIT_STD were tuned (PARAMETRIZATION=mup)"
    )
    mup_base_moe_ffn_hidden_size: NonNegative = numerics(
        0,
        "MOE_FFN_HIDDEN_SIZE of the base model; 0: MOE_FFN_HIDDEN_SIZE * MUP_BASE_HIDDEN_SIZE / HIDDEN_SIZE",
    )
    mup_base_topk: NonNegative = numerics(0, "TOPK of the base model; 0: same as in this model")
    mup_rule: Annotated[str, one_of(MUP_RULES)] = numerics(
        "mean_field",
        "initialization of the experts' second projection (PARAMETRIZATION=mup); "
        + ", ".join(f"{name}: {rule.text}" for name, rule in MUP_RULES.items()),
    )

    @property
    def kv_channels(self) -> int:
        """Channels per attention head; with multi-latent attention, per query/key head."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def rope_seq_len(self) -> int:
        """The setting ROPE_ORIGINAL_SEQ_LEN. If it is 0, the default for the method in ROPE_SCALING."""
        return self.rope_original_seq_len or (8192 if self.rope_scaling == "llama3" else 4096)

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding, including padding."""
        # Megatron pads to a multiple of 128*TP; without TP here, it does not change the model.
        return -(-self.vocab_size // 128) * 128

    @property
    def gated(self) -> bool:
        """Whether the activation is gated, which doubles the first projection's width."""
        return self.activation in ("swiglu", "clamped_swiglu", "geglu")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.multi_latent_attention:
            yield from self._latent_attention_problems()
        else:
            yield from self._attention_problems()
        yield from self.broken(
            (self.qk_norm_scope == "all" and self.normalization != "RMSNorm", "qk_norm_scope",
             f"is not implemented for NORMALIZATION={self.normalization}",
             "set NORMALIZATION=RMSNorm, or QK_NORM_SCOPE=head"),
        )  # fmt: skip
        yield from self.without_effect("normalization", ["norm_bias"], "LayerNorm")
        yield from self.without_effect("qk_norm", ["qk_norm_scope", "qk_norm_epsilon"], "true")
        yield from self._rope_scaling_problems()
        yield from self.without_effect("mtp_num_layers", ["mtp_loss_coeff"])
        is_mup = self.parametrization == "mup"
        yield from self.broken(
            (is_mup and not self.mup_base_hidden_size, "mup_base_hidden_size",
             "PARAMETRIZATION=mup requires the sizes of a base model",
             "set MUP_BASE_HIDDEN_SIZE to the HIDDEN_SIZE at which LR was tuned"),
            (is_mup and self.tie_embeddings, "parametrization",
             "cannot be combined with TIE_EMBEDDINGS=true: embedding and output layer scale differently",
             "set TIE_EMBEDDINGS=false"),
            (is_mup and self.multi_latent_attention, "parametrization",
             "cannot be combined with MULTI_LATENT_ATTENTION=true, as no muP rule covers its compressed "
             "widths",
             "set MULTI_LATENT_ATTENTION=false"),
        )  # fmt: skip

    def _attention_problems(self) -> Iterator[str]:
        """Checks the number of attention heads, their size, and the number of rotated channels."""
        yield from self.must_divide("num_query_groups", "NUM_HEADS", self.num_heads)
        if not self.head_dim:
            yield from self.must_divide("num_heads", "HIDDEN_SIZE", self.hidden_size)
        channels = self.kv_channels
        if channels % 2:
            rule = "rotary position embedding rotates pairs of channels, so the head size must be even"
            yield problem("head_dim", channels, rule, f"set HEAD_DIM to {multiples(2, channels)}")
        turned, is_partial = int(channels * self.rotary_fraction), self.rotary_fraction < 1
        below = turned // 2 * 2
        fractions = [size / channels for size in (below, below + 2) if 0 < size <= channels]
        yield from self.broken(
            (is_partial and (turned == 0 or turned % 2), "rotary_fraction",
             f"rotates {turned} of the {channels} channels per head, but rotary position embedding requires"
             " a positive even number",
             "set ROTARY_FRACTION to " + " or ".join(f"{fraction:g}" for fraction in fractions)),
            (is_partial and self.rope_scaling == "yarn", "rotary_fraction",
             "Megatron's YaRN rotates all channels of a head", "set ROTARY_FRACTION=1, or ROPE_SCALING=none"),
        )  # fmt: skip
        sizes = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        yield from self.without_effect("multi_latent_attention", sizes, "true")

    def _latent_attention_problems(self) -> Iterator[str]:
        for name, rule in _NOT_LATENT.items():
            if getattr(self, name) != (default := type(self).model_fields[name].default):
                fix = f"set {name.upper()}={as_given(default)}, or MULTI_LATENT_ATTENTION=false"
                yield self.problem(name, rule, fix)
        yield from self.broken(
            (self.rope_scaling == "llama3", "rope_scaling",
             "Megatron's MULTI_LATENT_ATTENTION only supports YaRN", "set ROPE_SCALING=yarn or none"),
            (self.qk_pos_emb_head_dim % 2, "qk_pos_emb_head_dim",
             "rotary position embedding rotates pairs of channels, so the number must be even",
             f"set QK_POS_EMB_HEAD_DIM={self.qk_pos_emb_head_dim + 1}"),
        )  # fmt: skip

    def _rope_scaling_problems(self) -> Iterator[str]:
        scaling = self.rope_scaling
        yield from self.without_effect("rope_scaling", ["rope_scaling_factor", "rope_original_seq_len"])
        yield from self.broken(
            (scaling != "none" and self.rope_scaling_factor == 1, "rope_scaling",
             "has no effect while ROPE_SCALING_FACTOR=1", "set ROPE_SCALING_FACTOR, or ROPE_SCALING=none"),
            (scaling == "llama3" and self.rope_seq_len != 8192, "rope_original_seq_len",
             "with ROPE_SCALING=llama3, Megatron only supports 8192",
             "set ROPE_ORIGINAL_SEQ_LEN=8192, or ROPE_SCALING=yarn"),
            (scaling == "yarn" and self.yarn_beta_fast < self.yarn_beta_slow, "yarn_beta_fast",
             f"must be at least YARN_BETA_SLOW={self.yarn_beta_slow:g}",
             "set YARN_BETA_FAST=32 and YARN_BETA_SLOW=1"),
        )  # fmt: skip
        names = [name for name in type(self).model_fields if name.startswith("yarn_")]
        yield from self.without_effect("rope_scaling", names, "yarn")

    def without_effect(self, switch: str, names: Sequence[str], needed: str = "") -> Iterator[str]:
        """Yields an error line for each setting in `names` that differs from its default but has no effect.
        `names` have an effect if setting `switch` is `needed` or, if `needed` is empty, neither 0 nor none.
        """
        value, switch = as_given(getattr(self, switch)), switch.upper()
        if value == needed if needed else value not in ("0", "none"):
            return
        for name in names:
            if getattr(self, name) != (default := type(self).model_fields[name].default):
                usual = f"{name.upper()}={as_given(default).removesuffix('.0')}"
                fix = f"set {switch}={needed}, or {usual}" if needed else f"set {switch}, or {usual}"
                yield self.problem(name, f"has no effect while {switch}={value}", fix)

    def layers_in(self, pattern: str, first: int = 0) -> list[bool]:
        """Tells which layers `pattern` chooses; never chooses layers before `first`. If `pattern` is a list
        of zeros and ones, the result is as long as that list.
        """
        return list(layers_of_pattern(pattern, self.num_layers, first))

    def pattern_problems(self, name: str, layers: Sequence[bool]) -> Iterator[str]:
        """Yields an error line unless `layers` has NUM_LAYERS entries; `layers` comes from setting `name`."""
        if len(layers) != self.num_layers:
            rule = f"has {len(layers)} layers, but NUM_LAYERS={self.num_layers}"
            fix = f"give a number, a ratio n:m, or a list of {self.num_layers} zeros and ones"
            yield self.problem(name, rule, fix)
