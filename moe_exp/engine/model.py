"""Builds Megatron's GPTModel with our layers; initial weights do not depend on the parallel layout."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from moe_exp.config import Config
from moe_exp.engine.graphs import on_side_stream
from moe_exp.engine.initial_weights import initialize_weights
from moe_exp.engine.runtime import Runtime
from moe_exp.layers.experts import ACTIVATIONS
from moe_exp.layers.kernels.cross_entropy import choose_cross_entropy, linear_losses, token_losses
from moe_exp.layers.kernels.launch import KernelFailure, choose_routing, failure_of
from moe_exp.layers.megatron.documents import RestartingPositions
from moe_exp.layers.megatron.moe_parts import balancing_losses, router_config
from moe_exp.layers.megatron.residual import SumAndNorm, change_norms, choose_norm, scale_ends
from moe_exp.layers.megatron.rotary import install_rotary, rotate_windows
from moe_exp.layers.megatron.saved_tensors import ActivationOffload, NormRecompute
from moe_exp.layers.megatron.token_prediction import PredictingModel, prediction_spec
from moe_exp.layers.moe_layer import needs_scores
from moe_exp.layers.router import kernel_problem
from moe_exp.layers.spec import MegatronMoELayer, decoder_spec

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def use_te(config: Config) -> bool:
    """Whether the modules around the MoE layer come from Transformer Engine."""
    if config.impl == "auto":
        return (
            not config.needs_own_layers
            and torch.cuda.is_available()
            and importlib.util.find_spec("transformer_engine") is not None
        )
    return config.impl == "te"


def transformer_config(config: Config) -> TransformerConfig:
    """Megatron's configuration of the model and its parallelism."""
    dtype = DTYPES[config.dtype]
    activation, gated, limit, offset = ACTIVATIONS[config.activation]
    on_gpu, without_rotary = torch.cuda.is_available(), config.layers_without_rotary
    kind = MLATransformerConfig if config.multi_latent_attention else TransformerConfig
    settings = kind(
        num_layers=config.num_layers,
        mtp_num_layers=config.mtp_num_layers or None,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_heads if config.multi_latent_attention else config.num_query_groups,
        kv_channels=config.kv_channels,
        activation_func=activation,
        gated_linear_unit=gated,
        activation_func_clamp_value=limit,
        glu_linear_offset=offset,
        normalization=config.normalization,
        layernorm_epsilon=config.norm_epsilon,
        qk_layernorm=config.qk_norm and config.qk_norm_scope != "all",
        add_bias_linear=config.add_bias_linear,
        add_qkv_bias=config.qkv_bias,
        softmax_scale=config.attention_multiplier or None,
        softmax_type="vanilla" if config.attention_sinks == "none" else "learnable",
        attention_output_gate=config.attention_gate,
        window_size=(config.sliding_window - 1, 0) if config.sliding_window else None,
        window_attn_skip_freq=[int(has_window) for has_window in config.window_layers],
        # a list has no entries for layers for multi-token prediction
        no_rope_freq=[int(lacks_it) for lacks_it in without_rotary] if any(without_rotary) else None,
        hidden_dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        # `initialize_weights` draws the weights. Megatron's initialization still runs and marks parameters.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        fp16=config.dtype == "fp16",
        bf16=config.dtype == "bf16",
        deterministic_mode=config.deterministic,
        params_dtype=dtype,
        fp8=None if config.fp8 == "none" or config.is_fp8_by_kernels else config.fp8,
        fp8_recipe=config.fp8_recipe,
        pipeline_dtype=dtype,
        # Without biases and dropout it is a single sum, and a compiled function takes ten times as long to
        # launch.
        bias_dropout_fusion=on_gpu and (config.add_bias_linear or config.dropout > 0),
        bias_activation_fusion=on_gpu and config.activation == "swiglu",
        # The fused rotary embedding ignores YaRN's factor on queries and keys, is experimental with MLA, and
        # in Transformer Engine uses the same positions in every sample.
        apply_rope_fusion=(install_rotary() or (on_gpu and use_te(config)))
        and not config.document_mask
        and config.rope_scaling != "yarn"
        and not config.multi_latent_attention,
        gradient_accumulation_fusion=on_gpu
        and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        **(_latent_settings(config) if config.multi_latent_attention else {}),
        **_parallel_settings(config),
        **(_moe_settings(config) if config.use_moe else {}),
    )
    _set_beyond_megatron(settings, config)
    return settings


def _parallel_settings(config: Config) -> dict[str, Any]:
    """Fields of TransformerConfig for parallelism and activation recomputation."""
    layout = None
    if len(set(config.stage_layers)) > 1:  # lists the layers of each chunk, if stages differ
        vpp = config.vpp or 1
        layout = [["decoder"] * (layers // vpp) for _ in range(vpp) for layers in config.stage_layers]
        layout[0].insert(0, "embedding")
        layout[-1] += ["mtp"] * config.mtp_num_layers + ["loss"]
    recompute: dict[str, Any] = {}
    if config.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform"}
        recompute["recompute_num_layers"] = 1
    elif config.recomputed:
        recompute = {
            "recompute_granularity": "selective",
            "recompute_modules": sorted(config.recomputed & {"core_attn", "mla_up_proj", "moe", "moe_act"}),
            # Megatron accepts recomputation of the activation only with grouped experts.
            "moe_grouped_gemm": "moe_act" in config.recomputed,
        }
    return recompute | {
        "tensor_model_parallel_size": config.tp,
        "pipeline_model_parallel_size": config.pp,
        "virtual_pipeline_model_parallel_size": config.vpp,
        "pipeline_model_parallel_layout": layout,
        "context_parallel_size": config.cp,
        # A dense baseline keeps EP and ETP of the MoE model that it is compared with, but does not use them.
        "expert_model_parallel_size": config.ep if config.use_moe else 1,
        "expert_tensor_parallel_size": config.etp if config.use_moe else 1,
        "sequence_parallel": config.tp > 1,
        # Without overlapped p2p the interleaved schedule mixes up micro-batches on two pipeline ranks.
        "overlap_p2p_comm": config.vpp is not None,
        "batch_p2p_comm": config.vpp is None,
        # gloo may still be sending from storage that Megatron frees, and with overlapped p2p so may NCCL
        # before Megatron-Core 0.19.
        "deallocate_pipeline_outputs": torch.cuda.is_available() and config.vpp is None,
    }


def _moe_settings(config: Config) -> dict[str, Any]:
    return {
        "num_moe_experts": config.num_experts,
        # 1 instead of a list of ones gives all layers one key, as in Megatron's MoE checkpoints.
        "moe_layer_freq": 1 if all(config.moe_layers) else [int(is_moe) for is_moe in config.moe_layers],
        "moe_ffn_hidden_size": config.expert_ffn_size,
        "moe_shared_expert_intermediate_size": config.shared_expert_size or None,
        "moe_shared_expert_gate": config.shared_expert_gate,
        "moe_latent_size": config.moe_latent_size or None,
        "moe_router_topk": config.topk,
        "moe_router_pre_softmax": True,  # False is refused with TOPK=1; `_set_beyond_megatron` sets the value
        "moe_router_topk_scaling_factor": config.router_scaling_factor,
        "moe_router_dtype": config.router_dtype,
        "moe_input_jitter_eps": config.router_jitter or None,
        "moe_z_loss_coeff": config.z_loss_coeff or None,
        "moe_router_bias_update_rate": config.router_bias_update_rate,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_num_groups": config.num_router_groups or None,
        "moe_router_group_topk": config.router_group_topk or None,
        "moe_expert_capacity_factor": config.expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": config.moe_type == "moe" and config.pad_to_capacity,
        "moe_token_drop_policy": config.drop_policy,
    }


def _set_beyond_megatron(settings: TransformerConfig, config: Config) -> None:
    """Sets values for our layers that TransformerConfig would reject or has no field for."""
    settings.context_stripes = config.context_stripes
    settings.window_query_groups = config.window_query_groups
    # The tensors of all layers are stacked under one key only if they have equal shapes.
    settings.hetereogenous_dist_checkpoint = not config.has_equal_attention
    if config.recomputed:
        settings.recompute_modules += sorted(config.recomputed - set(settings.recompute_modules))
    if config.use_moe:
        losses = config.balancing_losses
        settings.moe_router_score_function = config.router_score
        settings.moe_router_pre_softmax = config.router_pre_softmax
        # Megatron's finalize_model_grads then updates the bias; see also `optimizer_setup.RouterState`.
        settings.moe_router_enable_expert_bias = config.router_bias_update_rate > 0
        settings.moe_router_load_balancing_type = list(losses) or config.aux_loss_type
        settings.moe_aux_loss_coeff = list(losses.values()) or 0.0
    if config.rope_scaling == "yarn" and not config.multi_latent_attention:  # MLA has fields for YaRN
        settings.yarn_rotary_scaling_factor = config.rope_scaling_factor
        settings.yarn_original_max_position_embeddings = config.rope_seq_len
        settings.yarn_beta_fast, settings.yarn_beta_slow = config.yarn_beta_fast, config.yarn_beta_slow
        settings.yarn_mscale, settings.yarn_mscale_all_dim = config.yarn_mscale, config.yarn_mscale_all_dim
        settings.yarn_correction_range_round_to_int = config.yarn_truncate


def _latent_settings(config: Config) -> dict[str, Any]:
    return {
        "q_lora_rank": config.q_lora_rank or None,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_head_dim,
        "qk_pos_emb_head_dim": config.qk_pos_emb_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "yarn" if config.rope_scaling == "yarn" else "rope",
        "rotary_base": config.rotary_base,
        # Megatron scales the scores by this factor and by mscale_all_dim regardless of rope_type.
        "rotary_scaling_factor": config.rope_scaling_factor,
        "original_max_position_embeddings": config.rope_seq_len,
        "beta_fast": config.yarn_beta_fast,
        "beta_slow": config.yarn_beta_slow,
        "mscale": config.yarn_mscale,
        "mscale_all_dim": config.yarn_mscale_all_dim,
    }


def moe_options(config: Config, kernel_failures: Sequence[KernelFailure] = ()) -> dict[str, Any]:
    """MoE options without a field in TransformerConfig; `kernel_failures` is from `backends.check_run`."""
    routing, _ = choose_routing(
        config.routing_kernels, device_type=_device_type(), failure=failure_of("routing", kernel_failures)
    )
    router: dict[str, Any] = {
        "normalize": {"auto": None, "true": True, "false": False}[config.router_normalize],
        "use_kernels": routing == "triton",
        "top_p": config.router_top_p,
        "num_null_experts": config.null_experts,
        "group_best": config.router_group_best,
    }
    if config.router_bias_rule == "quantile":
        router |= {"expert_bias": True, "bias_rule": "quantile"}
    if config.force_routing != "none":
        router["assignment"] = config.force_routing
    instead = [failure.backend for failure in kernel_failures if failure.part == "experts"]
    return {
        "backend": instead[0] if instead else config.expert_backend,
        "fp8": config.is_fp8_by_kernels,
        "dispatcher": config.dispatcher,
        "router": router,
        "min_capacity": config.min_capacity,
        "token_rounding": config.token_rounding,
    }


def router_problem(config: Config) -> str:
    """Why the router cannot use a kernel (see `layers.router.kernel_problem`); empty if it can."""
    if not config.use_moe:
        return ""
    settings = transformer_config(config)
    rules = router_config(settings, moe_options(config)["router"])
    return kernel_problem(rules, needs_scores=needs_scores(balancing_losses(settings)))


def sum_problem(config: Config) -> str:
    """Why SumAndNorm's kernel cannot compute the residual sum and its norm; empty if it can."""
    problems = {
        "Transformer Engine's layers": use_te(config),
        f"NORMALIZATION={config.normalization}": config.normalization != "RMSNorm",
        f"NORM_PLACEMENT={config.norm_placement}": config.norm_placement not in ("pre", "around_moe"),
        f"RESIDUAL_MULTIPLIER={config.residual_multiplier:g}": config.residual_multiplier != 1,
        f"DROPOUT={config.dropout:g}": config.dropout > 0,
        "ADD_BIAS_LINEAR=true": config.add_bias_linear,
        "RECOMPUTE_MODULES=norm": "norm" in config.recomputed,
    }
    return next((name for name, holds in problems.items() if holds), "")


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _leave_as_is(weight: Tensor) -> Tensor:
    return weight


def build_model(
    config: Config, runtime: Runtime, kernel_failures: Sequence[KernelFailure] = (), *,
    has_graph: bool = False,
) -> list[DistributedDataParallel]:  # fmt: skip
    """Builds this rank's model chunks (VPP or 1) with initial weights and wraps them for data parallelism.

    With `has_graph`, micro-batches run as CUDA graphs, and gradients are exchanged after the last graph.
    """
    settings = transformer_config(config)
    chunks = [
        build_chunk(config, settings, runtime, stage, kernel_failures=kernel_failures)
        for stage in range(config.vpp or 1)
    ]
    for chunk in chunks:
        chunk.to(runtime.device)
    if config.dtype != "fp32":
        chunks = [Float16Module(settings, chunk) for chunk in chunks]
    ddp_config = _ddp_config(config, overlap=overlaps(config) and not has_graph)
    # As in Megatron, only the first chunk has buckets: communication of the others overlaps with computation
    # in any case.
    with on_side_stream() if has_graph else nullcontext():
        return [
            DistributedDataParallel(
                settings, ddp_config, chunk, disable_bucketing=index > 0, pg_collection=runtime.groups
            )
            for index, chunk in enumerate(chunks)
        ]


def build_chunk(
    config: Config, settings: TransformerConfig, runtime: Runtime, vp_stage: int, *,
    initial_weights: bool = True, kernel_failures: Sequence[KernelFailure] = (),
) -> GPTModel:  # fmt: skip
    """One model chunk; `initial_weights` is False if a checkpoint will be loaded."""
    pp_rank, last = runtime.groups.pp.rank(), config.pp - 1
    stage, is_yarn = vp_stage if config.vpp else None, config.rope_scaling == "yarn"
    if failure_of("rotary embedding", kernel_failures):
        settings.apply_rope_fusion = False
    failure = failure_of("cross entropy", kernel_failures)
    kind, _ = choose_cross_entropy(config.cross_entropy, device_type=_device_type(), failure=failure)
    model = {"megatron": PredictingModel, "triton": GPTModelWithOwnLoss, "linear": GPTModelWithLinearLoss}
    spec = decoder_spec(
        settings,
        use_te=use_te(config),
        vp_stage=stage,
        projection_norm=config.qk_norm and config.qk_norm_scope == "all",
        own_attention=config.document_mask or config.qk_clip > 0 or config.needs_own_attention,
        rotated_norm=config.qk_norm_scope == "rotated",
        norm_placement=config.norm_placement,
        residual_multiplier=config.residual_multiplier,
        attention={
            "softcap": config.attention_softcap,
            "sinks_in_windows": config.attention_sinks == "windowed",
            "backend": config.attention_backend,
            "value_scale": config.value_scale,
            "by_document": config.document_mask,
        },
        **moe_options(config, kernel_failures),
    )
    is_last = pp_rank == last and vp_stage == (config.vpp or 1) - 1
    has_mtp = is_last and config.mtp_num_layers > 0
    chunk = model[kind](
        settings,
        spec,
        vocab_size=config.padded_vocab_size,
        max_sequence_length=config.seq_len,
        pre_process=pp_rank == 0 and vp_stage == 0,
        post_process=is_last,
        mtp_block_spec=prediction_spec(spec.layer_specs[-1], config.mtp_num_layers) if has_mtp else None,
        share_embeddings_and_output_weights=config.tie_embeddings,
        # multi-latent attention creates its own YaRN embedding
        position_embedding_type="rope" if config.multi_latent_attention or not is_yarn else "yarn",
        rotary_base=config.rotary_base,
        rotary_percent=config.rotary_fraction,
        rope_scaling=config.rope_scaling == "llama3",
        rope_scaling_factor=config.rope_scaling_factor,
        pg_collection=runtime.groups,
        vp_stage=stage,
    )
    _change_modules(config, chunk, kernel_failures)
    if initial_weights:
        initialize_weights(chunk, config)
    return chunk


def _change_modules(config: Config, chunk: GPTModel, kernel_failures: Sequence[KernelFailure]) -> None:
    """Changes modules of Megatron's model that a spec cannot replace, and adds hooks for saved tensors."""
    if config.window_rotary_base:
        rotate_windows(chunk, chunk.config, config.window_rotary_base, config.window_layers)
    if config.document_mask:
        for module in list(chunk.modules()):  # the model has one, or with latent attention each layer
            if isinstance(rotary := getattr(module, "rotary_pos_emb", None), nn.Module):
                module.rotary_pos_emb = RestartingPositions(rotary)
    scale_ends(chunk, embedding=config.embedding_multiplier, logits=config.logits_scaling)
    change_norms(chunk, qk_epsilon=config.qk_norm_epsilon, has_bias=config.norm_bias)
    norm = choose_norm(
        _device_type(), problem=sum_problem(config), failure=failure_of("norm", kernel_failures)
    )
    if norm[0] == "triton":
        for layer in chunk.decoder.layers:
            SumAndNorm(layer)
    if "norm" in config.recomputed:
        NormRecompute(chunk)
    if config.offloaded:
        ActivationOffload(chunk, config.offloaded)


def overlaps(config: Config) -> bool:
    """Whether gradients and parameters are exchanged during forward and backward passes (OVERLAP)."""
    # Without other ranks on its stage, a rank has nothing to overlap, and buckets only cost host time.
    has_peers = config.world_size > config.pp
    return has_peers and torch.cuda.is_available() if config.overlap == "auto" else config.overlap == "true"


def _ddp_config(config: Config, *, overlap: bool) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.grad_dtype == "fp32",
        use_distributed_optimizer=config.distributed_optimizer,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and config.distributed_optimizer,
    )


def moe_layers(chunks: list[nn.Module]) -> Iterator[tuple[int, MegatronMoELayer]]:
    """(layer index in the whole model, layer) of every MoE layer on this rank."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MegatronMoELayer):
                yield module.layer_number - 1, module


class GPTModelWithOwnLoss(PredictingModel):
    """GPTModel with the cross entropy of layers/kernels/cross_entropy.py (CROSS_ENTROPY=triton)."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss of each token, fp32 [B, S], from labels [B, S] and this rank's logits [S, B, V]."""
        losses = token_losses(logits, labels.transpose(0, 1), self.pg_collection.tp)
        return losses.transpose(0, 1).contiguous()


class GPTModelWithLinearLoss(PredictingModel):
    """GPTModel that computes the output layer and the loss in chunks of tokens (CROSS_ENTROPY=linear)."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.post_process:  # the call of this layer, with its hooks, waits for gathered parameters
            self._project, self.output_layer.forward = self.output_layer.forward, self._output

    def forward(
        self, *args: Any, labels: Tensor | None = None, loss_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """As in GPTModel, but the losses' gradient must be a multiple of `loss_mask` (default: ones)."""
        self._targets: tuple[Tensor, Tensor] | None = None
        if labels is not None:
            self._set_targets(labels, loss_mask)
        return super().forward(*args, labels=labels, loss_mask=loss_mask, **options)

    def _set_targets(self, labels: Tensor, mask: Tensor | None) -> None:
        mask = torch.ones_like(labels, dtype=torch.float32) if mask is None else mask
        self._targets = labels.transpose(0, 1), mask.transpose(0, 1)

    def losses(self, hidden: Tensor, weight: Tensor | None, labels: Tensor, mask: Tensor | None) -> Tensor:
        """Sets the labels and mask of one prediction depth, then calls `losses` of PredictingModel."""
        self._set_targets(labels, mask)
        return super().losses(hidden, weight, labels, mask)

    def _output(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Output layer: returns (losses [S, B], None) with labels, and (logits, bias) without labels."""
        if self._targets is None:
            return self._project(hidden, weight, runtime_gather_output)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.pg_collection.tp)
        weight = self.output_layer.weight if weight is None else weight
        return linear_losses(hidden, weight, *self._targets, self.pg_collection.tp), None

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss of each token, fp32 [B, S]; `logits` already contains these losses, [S, B], from `_output`."""
        return logits.transpose(0, 1).contiguous()
