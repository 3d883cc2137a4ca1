"""MoE layer settings: position, expert sizes and capacity.

Router settings are in sections/router.py, and the other settings of the section Mixture of experts in
sections/backends.py.
"""

from collections.abc import Iterator
from typing import Literal

from moe_exp.config.sections.router import RouterSettings
from moe_exp.config.setting_types import LayerPattern, NonNegative, OptionalWidth, Rate, experts


class ExpertSettings(RouterSettings):
    """Settings of the section Mixture of experts, from MOE_TYPE to TOKEN_ROUNDING."""

    moe_type: Literal["moe", "dmoe"] = experts(
        "dmoe", "type of the MoE layers; moe: experts drop tokens above their capacity; dmoe: dropless"
    )
    moe_ffn_hidden_size: OptionalWidth = experts(0, "width of each routed expert; 0: FFN_HIDDEN_SIZE")
    moe_layer_freq: LayerPattern = experts(
        "1",
        "n: every n-th layer is MoE; n:m: n MoE layers, then m dense ones, repeated; or a pattern of 1 (MoE) "
        "and 0 (dense): '[0]*3+[1]*21', '0,1,1,1'",
    )
    first_k_dense: NonNegative = experts(0, "number of dense layers at the start of the model")
    shared_expert_size: OptionalWidth = experts(
        0, "width of the shared expert, which processes every token; 0: no shared expert"
    )
    shared_expert_gate: bool = experts(
        False, "scale the shared expert's output with a sigmoid gate per token"
    )
    moe_latent_size: OptionalWidth = experts(
        0,
        "latent width (LatentMoE): a shared projection reduces tokens to this width before dispatch, and "
        "another projection restores the model width after combine; 0: none",
    )
    capacity_factor: Rate = experts(
        0.0, "expert capacity relative to an equal share of the tokens (MOE_TYPE=moe); 0: same as 1.0"
    )
    min_capacity: NonNegative = experts(0, "minimum expert capacity (tokens per micro-batch; MOE_TYPE=moe)")
    pad_to_capacity: bool = experts(
        True, "pad every expert's input to its capacity, for fixed shapes (MOE_TYPE=moe)"
    )
    drop_policy: Literal["probs", "position"] = experts(
        "probs",
        "which tokens above the capacity are dropped (MOE_TYPE=moe); probs: lowest router weights; "
        "position: last in the sequence",
    )
    token_rounding: NonNegative = experts(
        0,
        "in training, round each expert's tokens per micro-batch down to a multiple of this number, such as "
        "128, so that the grouped GEMM has full tiles; drops the tokens with the lowest router weights "
        "(MOE_TYPE=dmoe); 0: off",
    )

    @property
    def moe_layers(self) -> list[bool]:
        """Flag per layer, true for MoE layers. A list in MOE_LAYER_FREQ sets the length, not NUM_LAYERS."""
        if not self.use_moe:
            return [False] * self.num_layers
        return self.layers_in(self.moe_layer_freq, self.first_k_dense)

    @property
    def all_moe_layers(self) -> list[bool]:
        """`moe_layers`, then the last layer's flag once per multi-token prediction layer."""
        return self.moe_layers + self.moe_layers[-1:] * self.mtp_num_layers

    @property
    def expert_ffn_size(self) -> int:
        """Width of one routed expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def expert_ffn_setting(self) -> str:
        """Setting that provides `expert_ffn_size`."""
        return "moe_ffn_hidden_size" if self.moe_ffn_hidden_size else "ffn_hidden_size"

    @property
    def expert_hidden_size(self) -> int:
        """Width of a routed expert's input and output: MOE_LATENT_SIZE, or the model's."""
        return self.moe_latent_size or self.hidden_size

    @property
    def expert_hidden_setting(self) -> str:
        """Setting that provides `expert_hidden_size`."""
        return "moe_latent_size" if self.moe_latent_size else "hidden_size"

    @property
    def expert_capacity_factor(self) -> float | None:
        """CAPACITY_FACTOR, or None for dropless layers."""
        return None if self.moe_type == "dmoe" else self.capacity_factor or 1.0

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.use_moe:
            yield from self._layer_problems()
            yield from self._size_problems(self.moe_latent_size)

    def _layer_problems(self) -> Iterator[str]:
        """Checks MOE_LAYER_FREQ and FIRST_K_DENSE."""
        problems = list(self.pattern_problems("moe_layer_freq", self.moe_layers))
        yield from problems
        if not (problems or any(self.moe_layers)):
            name, fix = "moe_layer_freq", "add a 1 to the pattern, or set USE_MOE=false"
            if self.first_k_dense:
                name = "first_k_dense"
                fix = f"set FIRST_K_DENSE to at most {self.num_layers - 1}, or USE_MOE=false"
            yield self.problem(name, f"leaves no MoE layer among NUM_LAYERS={self.num_layers}", fix)

    def _size_problems(self, latent: int) -> Iterator[str]:
        """Checks the shared expert, the latent width and the capacity."""
        is_dropless = self.moe_type == "dmoe"
        return self.broken(
            (self.add_bias_linear and self.shared_expert_size, "add_bias_linear",
             "Megatron's shared expert has no bias", "set ADD_BIAS_LINEAR=false or SHARED_EXPERT_SIZE=0"),
            (self.shared_expert_gate and not self.shared_expert_size, "shared_expert_gate",
             "has no effect without a shared expert", "set SHARED_EXPERT_SIZE, or SHARED_EXPERT_GATE=false"),
            (latent > self.hidden_size, "moe_latent_size",
             f"must be at most HIDDEN_SIZE={self.hidden_size}",
             f"set MOE_LATENT_SIZE to at most {self.hidden_size}, or 0 for none"),
            (latent and self.parametrization == "mup", "parametrization",
             f"cannot be combined with MOE_LATENT_SIZE={latent}: no muP rule covers the latent projections",
             "set MOE_LATENT_SIZE=0"),
            *((is_dropless and getattr(self, name), name,
               "only applies to MOE_TYPE=moe; MOE_TYPE=dmoe has no capacity",
               f"set MOE_TYPE=moe, or {name.upper()}=0") for name in ("capacity_factor", "min_capacity")),
            (self.token_rounding and not is_dropless, "token_rounding",
             "only applies to MOE_TYPE=dmoe; with MOE_TYPE=moe, the capacity sets the number of rows",
             "set MOE_TYPE=dmoe, or TOKEN_ROUNDING=0"),
        )  # fmt: skip
