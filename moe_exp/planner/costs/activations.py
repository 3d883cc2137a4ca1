"""Activation memory of a micro-batch, tensor by tensor. Does not import torch.

The table lists bytes per token. h is the hidden size; q, k and v are the channels of all query, key and value
heads; a is the number of heads, s the sequence length, f the width of an MLP or expert, E the number of
experts, K the experts per token, V the vocabulary size, w the bytes per number in the compute type (2 or 4),
and t the tensor-parallel size. Each tensor is counted once, at the last operation that reads it:

    norm             w*h input, 4 for statistics; on CPUs 8*h (PyTorch's RMSNorm keeps fp32 input and output)
    QKV projection   w*h input
    attention        w*(q+k+v)/t, result w*q/t, 4*a/t log-sums; unfused: w*a*s/t softmax scores, no log-sums
    projection       w*q/t input: a transposed copy of attention's result; on CPUs or if attention is
                     unfused, the result itself, which is counted only once
    norm, MLP        norm as above; w*h input, 2*w*f/t, and after the activation w*f/t (3*w*f/t if unfused)
    MoE, per token   w*h input, 4*E scores, K*(8+4) choice and weights
    MoE, per row     w*h row, 2*w*f, and w*f after the activation; no expert results, as router weights
                     multiply activations, not results; EXPERT_BACKEND=triton: 2*w*f, and w*h for remote rows
    latent size l    w*h input of the projection down, w*l input of the projection up, and another w*l if
                     the experts gather their rows themselves; rows are w*l instead of w*h
    loss             4*V/t probabilities in fp32, and w*V/t logits during the loss; CROSS_ENTROPY=triton:
                     w*V/t logits, and another w*V/t for their gradient during the loss;
                     CROSS_ENTROPY=linear: w*h gradient instead of the input, and 4*h*V/t (not per
                     token) for the weight's gradient

With FP8, the input of a product is kept in FP8, one byte per number. The experts' grouped GEMM receives
its weights in each call. For each micro-batch, the GEMM therefore also keeps two FP8 copies of the rank's
expert weights, one by rows and one by columns: 2 bytes per weight. The size of these copies has not been
validated against GPU measurements.

The terms of the unfused case without dropout, sequence parallelism or gates are from Korthikanti et al.
2022, arXiv:2205.05198, section 4.1. With dropout, that paper's sum is 34*s*b*h + 5*a*s^2*b for b sequences.
With sequence parallelism (section 4.2.2), terms above without t are also divided by t. The terms for gates,
grouped queries, experts and kernels are ours. The sums were checked against the tensors that autograd saves
on a CPU, and against the peak memory of four GPU runs.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from moe_exp.config.choices import LOSS_CHUNK_TOKENS, SCORES, Score
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.products import fp8_kept, padded_slots, planned_backend, planned_loss, priced
from moe_exp.planner.hardware import Hardware

Parts = dict[str, float]  # bytes by module
_WITH_ATTENTION = ("attention", "norms, dropout")  # parts of a layer


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch's activations on a rank."""

    dense_parts: Parts  # kept for the backward pass by a layer with a dense MLP, after recompute
    moe_parts: Parts  # the same for an MoE layer
    embedding: float  # kept by the embedding
    output_parts: Parts  # kept by the last norm, the output layer and the loss
    hidden: float  # the hidden state that a stage sends to the next
    recomputed: float  # recomputed by the layer that is in its backward pass
    layer_work: float  # temporary during a layer's backward pass: gradients, rows in transit
    output_work: float  # the same for output layer and loss
    moved_dense: Parts  # moved to host memory by a layer with a dense MLP (OFFLOAD_MODULES), not in the above
    moved_moe: Parts  # the same for an MoE layer; modules in the order in which they run

    def in_transit(self, num_dense: int, num_moe: int) -> tuple[float, float]:
        """Returns two sizes in bytes of the offloaded tensors on the device. The first is the
        largest size during backward of a chunk's last layers, minus the bytes that these layers have freed.
        The second is the size at the start of backward. During backward, the device holds the offloaded
        tensors of two consecutive modules. In a chunk, layers with dense MLPs come before MoE layers.
        """
        kinds = ((num_dense, self.moved_dense, self.dense_parts), (num_moe, self.moved_moe, self.moe_parts))
        stack = [kind for number, *kind in kinds for _ in range(min(2, number)) if kind[0]]
        if not stack:
            return 0.0, 0.0
        *below, (moved, parts) = stack
        sizes = [*([*below[-1][0].values()][-1:] if below else [0.0]), *moved.values()]
        pairs = dict(zip(moved, map(sum, pairwise(sizes)), strict=True))
        if "attention" in pairs:  # backward of the MLP has finished
            pairs["attention"] -= sum(size for name, size in parts.items() if name not in _WITH_ATTENTION)
        return max(*pairs.values(), sizes[-1]), sizes[-1]


def activations_of(job: PlannedJob, hardware: Hardware, imbalance: float = 1.0) -> Activations:
    """Activations of a micro-batch. `imbalance`: a rank's rows before drops, divided by its fair share."""
    return _Account(job, hardware, imbalance).activations()


def width_of(job: PlannedJob) -> int:
    """Returns the bytes per element in the job's compute dtype."""
    return 4 if job.precision == "fp32" else 2


class _Account:
    """Sums up tensor sizes. Matrix products use `_all_tokens`; `_tokens` is the sequence-parallel share."""

    def __init__(self, job: PlannedJob, hardware: Hardware, imbalance: float):
        config, on_cpu = job.config, hardware.is_cpu
        self._job, self._config, self._on_cpu, self._imbalance = job, config, on_cpu, imbalance
        self._width, self._hidden, self._tp = width_of(job), config.hidden_size, config.tp
        self._expert_hidden = config.expert_hidden_size  # width of the experts' input rows
        self._all_tokens = config.mbsz * config.seq_len / config.cp
        self._tokens = self._all_tokens / (config.tp if job.sequence_parallel else 1)
        # bytes per number of the input that a product keeps, in experts and in other layers
        self._expert_input, self._input = (1 if is_fp8 else self._width for is_fp8 in fp8_kept(config))
        # CPUs only have PyTorch's modules; GPUs normally use Transformer Engine's.
        self._is_fused = not (on_cpu or config.impl == "local" or config.needs_own_layers)
        self._backend = planned_backend(config, hardware)
        self._loss_kind = planned_loss(config, hardware)
        self._has_moe, self._has_dense = config.use_moe, not (config.use_moe and all(config.moe_layers))

    def activations(self) -> Activations:
        config, width = self._config, self._width
        hidden = width * self._hidden * self._tokens
        logits = self._all_tokens * config.padded_vocab_size / self._tp
        norm, mask = self._tokens * self._norm(self._hidden), 0.0
        if config.dropout:  # on CPUs the mask includes the scale and has the compute type
            mask = self._tokens * self._hidden * (width if self._on_cpu else 1)
        saved = self._saved()
        # the MLP's norm, of which the results are the input of MLP or router
        layer_input = self._tokens * self._input * self._hidden
        of_norm = min(saved.get("norm", saved.get("layernorm", 0.0)), layer_input)
        attention = self._attention() - sum(size for name, size in saved.items() if name != "mlp") + of_norm
        is_parallel = config.norm_placement == "parallel"
        of_norm = layer_input if is_parallel else of_norm  # attention keeps the input of MLP or router
        num_norms = {"around": (4, 4), "around_moe": (2, 3), "parallel": (1, 1)}
        in_dense, in_moe = num_norms.get(config.norm_placement, (2, 2))
        common = {"attention": attention, "norms, dropout": in_dense * norm + 2 * mask}
        dense, experts = {}, self._experts() if self._has_moe else {}
        saved_in_moe = self._saved_in_moe(experts)
        for name, size in saved_in_moe.items():
            experts[name.replace("_", " ")] -= size
        experts |= {"router": experts["router"] - of_norm} if experts else {}
        if self._has_dense:
            mlp = layer_input + self._all_tokens * self._mlp(config.ffn_hidden_size / self._tp)
            dense = common | {"dense MLP": mlp - saved.get("mlp", 0.0) - of_norm}
        of_moe = common | {"norms, dropout": in_moe * norm + 2 * mask}
        moe = of_moe | experts if self._has_moe else {}
        moved_dense, moved_moe = self._moved(dense), self._moved(moe)
        # backward recomputes one module after another, and one of a layer's two norms
        again = saved | saved_in_moe
        recomputed = max((size / 2 if name == "norm" else size for name, size in again.items()), default=0.0)
        if config.recompute == "full":
            shared = 0.0 if self._norms_in_fp32 and width < 4 else hidden  # the norm's input is already kept
            recomputed = max(sum(dense.values()), sum(moe.values())) - shared
            dense, moe = ({"layer inputs": hidden} if kept else {} for kept in (dense, moe))
        elif config.recompute == "selective" and self._has_moe:
            of_layer = 0.0 if is_parallel else hidden
            recomputed += sum(experts.values()) - of_layer
            moe = of_moe | {"layer inputs": of_layer}
        # The cross entropy keeps targets, and either probabilities and a mask or logits and log-sums. During
        # its forward and backward pass, it also holds the gradient; on a CPU, PyTorch holds logits and
        # probabilities in fp32.
        loss = width * logits + 12 * self._all_tokens
        loss_work = (8 if self._on_cpu and width < 4 else width) * logits
        if self._loss_kind == "megatron":
            loss = 4 * logits + 9 * self._all_tokens
            # Probabilities are computed from an fp32 copy of the logits; fp32 logits are overwritten.
            loss_work = width * logits if width < 4 else 0.0
        elif self._loss_kind == "linear":
            # instead of the input, its gradient in all ranks' parts of the sequence
            weight_gradient = 4 * config.padded_vocab_size / self._tp * self._hidden
            loss = width * self._hidden * self._all_tokens - hidden + 4 * self._all_tokens + weight_gradient
            loss_work *= min(1.0, LOSS_CHUNK_TOKENS / self._all_tokens)
            loss_work += weight_gradient if width < 4 else 0.0  # a chunk's product, before it is added
        return Activations(
            dense_parts=dense, moe_parts=moe, embedding=8 * self._all_tokens + mask,
            output_parts={"norms, dropout": norm, "logits, loss": hidden + loss}, hidden=hidden,
            recomputed=recomputed, layer_work=self._work(), output_work=loss_work,
            moved_dense=moved_dense, moved_moe=moved_moe,
        )  # fmt: skip

    def _moved(self, parts: Parts) -> Parts:
        """Deletes offloaded modules (OFFLOAD_MODULES) from a layer's `parts`; returns each module's bytes."""
        parts_of = {
            "attention": ("attention",), "mlp": ("dense MLP",), "shared_expert": ("shared expert",),
            "experts": ("dispatch", "experts"),
        }  # fmt: skip
        return {
            module: sum(parts.pop(name) for name in names if name in parts)
            for module, names in parts_of.items()
            if module in self._config.offloaded and not parts.keys().isdisjoint(names)
        }

    def _saved(self) -> dict[str, float]:
        """For each recomputed module, the bytes that a layer does not keep (see `Engine.recompute`)."""
        modules, config = self._job.engine.recompute, self._config
        if not modules or config.recompute == "full":
            return {}
        query, key, value, result = self._channels
        per_token = self._all_tokens / self._tp
        heads = self._width * per_token
        of_latent = [config.q_lora_rank, config.kv_lora_rank] if config.multi_latent_attention else []
        sizes = {
            "layernorm": 2 * self._input * self._tokens * self._hidden,
            "norm": self._tokens
            * (2 * self._input * self._hidden + self._width * sum(of_latent) * config.qk_norm),
            "mla_up_proj": heads * (query + key + value) if of_latent else 0.0,
            "core_attn": heads * result,
            "mlp": self._all_tokens * self._mlp(config.ffn_hidden_size / self._tp),
        }
        if self._on_cpu:
            if self._norms_in_fp32 and self._width < 4:  # then the input is kept instead
                sizes["norm"] = 0.0
            sizes["core_attn"] = 4 * config.num_heads * per_token  # the result is the projection's input
            if self._writes_scores:
                sizes["core_attn"] = per_token * self._core() - heads * (query + key + value + result)
            if "core_attn" not in modules and of_latent:  # the core keeps copies of queries and keys, in fp32
                sizes["mla_up_proj"] = heads * value if self._width == 4 else 0.0
        return {name: size for name, size in sizes.items() if name in modules}

    def _saved_in_moe(self, experts: Parts) -> dict[str, float]:
        """Like `_saved`, but for the modules of an MoE layer. `experts`: result of `_experts`."""
        modules, config = self._job.engine.recompute, self._config
        if not (experts and modules) or config.recompute != "none":
            return {}
        router_width = priced(config, "router_dtype", {"fp32": 4, "fp64": 8})
        # the losses keep scores or logits, and the experts weights
        router = router_width * config.num_router_outputs * (1 + self._score.per_expert) + 8 * config.topk
        sizes = {
            "router": self._tokens * router,
            "experts": experts["experts"],
            "shared_expert": experts.get("shared expert", 0.0),
        }
        return {name: size for name, size in sizes.items() if name in modules}

    def _norm(self, size: float, heads: int = 1) -> float:
        """Bytes per token that a norm over `size` channels keeps: its input, and statistics of each head."""
        if self._config.normalization != "RMSNorm":
            return self._width * size + 2 * heads * (self._width if self._on_cpu else 4)
        return (8 if self._norms_in_fp32 else self._width) * size + 4 * heads

    @property
    def _norms_in_fp32(self) -> bool:
        """Whether PyTorch's CPU RMSNorm is used, which keeps its input and the normalized input in fp32."""
        return self._on_cpu and self._config.normalization == "RMSNorm"

    # Attention

    def _attention(self) -> float:
        """Bytes kept by the attention projections and core, excluding the preceding norm."""
        config = self._config
        is_latent, per_token = config.multi_latent_attention, float(self._input * self._hidden)
        if is_latent:  # inputs of latent attention's norms and projections (arXiv:2405.04434)
            for rank in filter(None, (config.q_lora_rank, config.kv_lora_rank)):
                per_token += self._width * rank + (self._norm(rank) if config.qk_norm else 0.0)
        norms, (query, key, *_) = 0.0, self._channels
        if config.qk_norm and not is_latent:
            norms = self._norm(query, config.num_heads) + self._norm(key, config.num_query_groups)
            if config.qk_norm_scope == "all":  # always an RMSNorm
                norms = (8 if self._on_cpu else self._width) * (query + key) + 8
        # the gate, a part of the first projection's result, its sigmoid in fp32, and the gated result
        gate = (2 * self._width + 4) * query if config.attention_gate else 0.0
        kept = self._tokens * per_token + self._all_tokens * (self._core() + norms + gate) / self._tp
        masks = 0.0
        if self._on_cpu and config.cp > 1 and not self._writes_scores:
            # masks of a rank's two blocks of queries against all earlier keys
            block, ends = config.seq_len / (2 * config.cp), config.seq_len * (1 + 1 / (2 * config.cp))
            masks = self._width * block * ends * (1 - self._windowed)
        # Cosines and sines of all positions. Megatron's rotary embedding keeps them for queries and keys of
        # each layer; `layers.megatron.rotary.rotate` shares them among layers that are not recomputed.
        positions = 0.0
        by_megatron = config.multi_latent_attention or config.document_mask or config.rope_scaling == "yarn"
        is_shared = self._is_fused or not (by_megatron or config.recompute == "full")
        if not (is_shared or self._job.of_deepspeed):
            turned = config.kv_channels * config.rotary_fraction
            if config.multi_latent_attention:
                turned = config.qk_pos_emb_head_dim
            positions = (4 if by_megatron else 1.5) * self._width * turned * config.seq_len / config.cp
        return kept + positions + masks

    @cached_property
    def _channels(self) -> tuple[float, float, float, float]:
        """Channels per token of queries, keys, values and results, averaged over all layers."""
        config = self._config
        query = config.num_heads * config.kv_channels
        if config.multi_latent_attention:
            value = config.num_heads * config.v_head_dim
            return query, query, value, value
        key = sum(config.layer_query_groups) / config.num_layers * config.kv_channels
        return query, key, key, query

    def _core(self) -> float:
        """Bytes per token kept by the attention core and the output projection, over all heads."""
        config, width = self._config, self._width
        query, key, value, result = self._channels
        if self._writes_scores:  # after softmax; with dropout also a mask and the dropped-out scores
            scores = config.num_heads * config.seq_len
            if self._on_cpu:  # unfused, in fp32, with keys and values repeated for each query head
                copies = 3 if config.attention_dropout else 1
                return 4 * (2 * query + result) + 4 * scores * copies + width * result
            kept = (2 * width + 1 if config.attention_dropout else width) * scores
            is_recomputed = config.recompute in ("selective", "moe_act") and not self._has_moe
            return width * (query + key + value + result) + (0 if is_recomputed else kept)
        log_sums = 4 * config.num_heads
        # Our attention gathers keys and values of the whole sequence and joins the results of two blocks.
        # Transformer Engine's passes them from rank to rank and keeps only those of its own rank.
        if config.cp > 1 and (not self._is_fused or config.document_mask or config.qk_clip):
            # with a window, each block's own and those of the window before it
            before = 2 * config.cp * (config.sliding_window - 1) / config.seq_len
            gathered = config.cp + self._windowed * (1 + before - config.cp)
            per_token = width * (query + gathered * (key + value) + result)
            return per_token + self._input * result + log_sums
        if self._is_fused or config.multi_latent_attention:
            projected = 0 if self._on_cpu else self._input * result
            return width * (query + key + value + result) + projected + log_sums
        # Unless scaled, the values are a view of the projection's result, which is therefore kept as a whole.
        values = value if config.value_scale != 1 else query + key + value
        results = result if self._on_cpu else 2 * result
        return width * (query + key + values + results) + log_sums

    @cached_property
    def _windowed(self) -> float:
        """Share of layers with windows so short that CP gathers only the ends of key and value blocks."""
        config = self._config
        fits = config.sliding_window <= config.seq_len / (2 * config.cp) + 1 and not config.document_mask
        return fits * sum(config.window_layers) / config.num_layers

    @cached_property
    def _writes_scores(self) -> bool:
        """Whether attention is unfused and thus keeps scores. On CPUs, dropout and MLA are not fused."""
        config = self._config
        by_blocks = config.sliding_window or config.attention_softcap or config.attention_sinks != "none"
        by_torch = (config.multi_latent_attention and not by_blocks) or config.attention_dropout
        return not self._job.fused_attention or bool(self._on_cpu and by_torch)

    # MLP and experts

    def _mlp(self, ffn: float) -> float:
        """Bytes per token kept by an MLP's activation function and second projection."""
        # Unfused SwiGLU: both halves, the activated one, the other with Megatron's offset, and their product.
        # Fused: three of these. Clamped: also the clamped gate and its sigmoid.
        swiglu = 5 if self._on_cpu else 3
        kept = {"swiglu": swiglu, "clamped_swiglu": 7, "geglu": 5, "gelu": 2, "squared_relu": 2}
        inputs = (self._width - self._input) * ffn  # of the second product
        return priced(self._config, "activation", kept) * self._width * ffn - inputs

    def _experts(self) -> Parts:
        """Bytes kept by router, dispatch, routed experts and shared expert, excluding the preceding norm."""
        config, width = self._config, self._width
        ffn = config.expert_ffn_size / config.etp
        # One function may compute all experts of a rank and recompute their activation in the backward pass.
        # If the rank has all experts, this function also gathers their rows, again in the backward pass.
        runs_as_one = self._backend == "triton" or (self._on_cpu and self._backend == "loop")
        is_local = config.dispatcher in ("auto", "local") and config.ep == config.etp == 1
        keeps_few = self._backend == "triton" and self._score.uses_positive
        gathers_itself = runs_as_one and is_local and not keeps_few
        computed = width * ffn * (2 if config.gated else 1)
        dispatched = 4 + (8 if self._backend == "triton" else 16)
        if not gathers_itself:  # the row, and indices in both directions
            indices = 16 + (24 if config.ep * config.etp > 1 else 0)
            dispatched = self._expert_input * self._expert_hidden + 4 + indices
            is_computed_again = "moe_act" in config.recomputed or runs_as_one
            computed += self._expert_input * (0 if is_computed_again else ffn)
        # scores, choice and chosen scores of a token; its logits, if a loss or the score needs them
        router_width = priced(config, "router_dtype", {"fp32": 4, "fp64": 8})
        slots = config.num_experts if self._score.uses_positive else config.topk
        router = router_width * config.num_router_outputs + (8 + router_width) * slots
        if self._score.per_expert or config.z_loss_coeff:
            router += router_width * (config.num_router_outputs + 1)
        kept = {
            "router": self._tokens * (router + width * self._hidden),
            "dispatch": self._rows * dispatched,
            "experts": self._rows * computed,
        }
        if fp8_kept(config)[0]:
            ways, local = 3 if config.gated else 2, config.num_experts / config.ep
            kept["experts"] += 2 * local * ways * self._expert_hidden * config.expert_ffn_size / config.etp
        if config.moe_latent_size:  # input of the projection up, and the tokens that the experts gather from
            gathered = width * self._expert_hidden if gathers_itself else 0.0
            kept["dispatch"] += self._tokens * (self._input * self._expert_hidden + gathered)
        if config.shared_expert_size:
            gate = self._tokens * width * (self._hidden + 1) if config.shared_expert_gate else 0.0
            kept["shared expert"] = self._all_tokens * self._mlp(config.shared_expert_size / self._tp) + gate
        return kept

    @cached_property
    def _score(self) -> Score:
        return priced(self._config, "router_score", SCORES)

    @cached_property
    def _rows(self) -> float:
        """Number of rows (slots sent by all ranks) that a rank's experts compute."""
        config, factor = self._config, self._config.expert_capacity_factor
        if factor is not None and config.pad_to_capacity:
            return padded_slots(config, self._tokens)
        per_token = config.experts_per_token
        # In the first iterations, before `l1` closes the gates of the others, half of all experts are active.
        if self._score.uses_positive:
            per_token = max(per_token, config.num_experts / 2)
        slots = self._tokens * per_token * config.etp
        return slots * (self._imbalance if factor is None else min(self._imbalance, factor))

    def _work(self) -> float:
        """Temporary bytes in a layer's backward pass: the maximum over MLP, experts and attention scores."""
        config, ways = self._config, 2 if self._config.gated else 1
        mlp = experts = scores = 0.0
        if self._has_dense:
            mlp = self._tokens * self._hidden
            mlp += self._all_tokens * (1 + ways) * config.ffn_hidden_size / self._tp
        if self._has_moe:
            ffn = config.expert_ffn_size / config.etp
            experts = self._rows * (2 * self._expert_hidden + (1 + ways) * ffn)
            experts += config.num_experts // config.ep * self._expert_hidden * ways * ffn
            if config.dispatcher == "allgather":  # receives the tokens of all ranks
                experts += self._tokens * config.ep * config.etp * self._expert_hidden
        if self._writes_scores:
            scores = config.num_heads * config.seq_len * self._all_tokens / self._tp
        return self._width * max(mlp, experts, 2 * scores)
