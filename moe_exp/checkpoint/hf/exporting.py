"""Converts checkpoints to Hugging Face folders and chooses the transformers architecture. To save memory, one
process reads one tensor of one layer at a time. Tensors of experts are read for the whole layer at once.
"""

import contextlib
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import check_target, new_folder, one_checkpoint, unusable
from moe_exp.checkpoint.format.naming import single_styles, weight_keys
from moe_exp.checkpoint.format.settings import saved_config, saved_order
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, StoredTensor, read_common
from moe_exp.checkpoint.hf import model_folder
from moe_exp.checkpoint.hf.families import Architecture
from moe_exp.checkpoint.hf.families_attention import ARCHITECTURES
from moe_exp.checkpoint.hf.fields import LATENT_EPSILON, UnsupportedModel, group_ranking
from moe_exp.checkpoint.hf.tensor_rules import MappedPiece, Theirs, misfits, pieces, taken_apart
from moe_exp.checkpoint.tools.info import iteration_of
from moe_exp.config import Config
from moe_exp.config.choices import LOSS_STATE
from moe_exp.config.model_changes import shape_facts
from moe_exp.data.embedded import embedded_folder
from moe_exp.data.own_text import find_prepared_text
from moe_exp.data.tokens.manifests import trained_documents
from moe_exp.host.files import expanded, write_json
from moe_exp.host.processes import own_command
from moe_exp.host.progress import progress

_MAIN = ("optimizer.state.param.", "optimizer.state.fp32_param.")  # the second: older versions, Megatron-LM


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    architecture: str  # transformers class
    num_bytes: int  # size of the weights
    notes: tuple[str, ...]  # lines for the user


def to_hf(
    source: Path, target: Path, *, dtype: str | None = None, main_weights: bool = False,
    max_shard_bytes: int = 5 * 10**9, tokenizer: Path | None = None, like: Path | None = None,
) -> Exported:  # fmt: skip
    """Exports a checkpoint of this package, in any parallel layout, to a Hugging Face folder.

    Args:
        source: iter_ folder, checkpoints folder or run folder.
        target: folder to create.
        dtype: dtype of the written weights (`fp32`, `bf16` or `fp16`); None: unchanged.
        main_weights: write the optimizer's fp32 main weights, which are more precise than bf16 weights.
        max_shard_bytes: maximum size of the tensors in each file.
        tokenizer: tokenizer folder or tokenizer.json; None: the checkpoint's TOKENIZER, if it still exists.
        like: Hugging Face folder that provides generation_config.json, token ids and
            max_position_embeddings. If several transformers classes are equivalent to the model, `like` also
            selects the class. None: the original folder if the checkpoint or its run's LOAD_DIR was imported.

    Raises:
        ValueError: if the checkpoint has no settings, no architecture is equivalent to the model, tensors are
            missing or unused, or the target cannot be written. An error leaves no files on disk.
    """
    check_target(target)
    if tokenizer is not None:
        model_folder.check_tokenizer(tokenizer)
    of_like = ("config.json", model_folder.GENERATION)
    if like is not None and not any((like / name).is_file() for name in of_like):
        rule = f"has neither config.json nor {model_folder.GENERATION}"
        raise unusable(f"LIKE={like}", rule, "specify a Hugging Face folder, or omit --like")
    if max_shard_bytes < 1:
        raise unusable(f"MAX_SHARD_SIZE={max_shard_bytes}", "must be at least 1 byte", "use a size like 5GB")
    folder = one_checkpoint(source)
    config = saved_config(folder)
    longest_is_kept = like is None
    # An imported checkpoint keeps its source's JSON files, card and license beside it.
    places = [folder.parent, *(expanded(one) for one in (config.load_dir, config.upcycle_from) if one)]
    original = next(filter(Path.is_dir, (place / model_folder.ORIGINAL for place in places)), None)
    like = like or original
    kept = model_folder.kept_fields(like)
    architecture = choose_architecture(config, kept.pop("architectures", None) or ())
    planned = list(pieces(architecture.tensors, config, scales=architecture.scales))
    of_file = model_folder.TORCH_DTYPES[dtype] if dtype else None
    weights = _Weights(CheckpointReader(folder), planned, main=main_weights, dtype=of_file)
    with new_folder(target, num_bytes=weights.num_bytes) as partial:
        with progress("converting", weights.num_bytes) as advance:
            tensors = chain.from_iterable(weights.parts(piece, config) for piece in planned)
            model_folder.write_shards(partial, weights.entries, tensors, advance, max_bytes=max_shard_bytes)
        tokenizer = tokenizer or _tokenizer_of(config, folder)
        has_tokenizer = tokenizer is not None and model_folder.copy_tokenizer(tokenizer, partial)
        documents, trained = trained_documents(config, saved_order(folder)), {}
        if has_tokenizer and documents is not None:
            trained = model_folder.as_in_documents(partial, documents)
        name, of_torch = architecture.name, str(weights.usual_dtype).removeprefix("torch.")
        fields = fields_of(config, architecture) | model_folder.token_ids(partial)
        longest = fields["max_position_embeddings"] if longest_is_kept else 0
        fields |= kept
        # training may have extended the source's length
        fields["max_position_embeddings"] = max(longest, fields["max_position_embeddings"])
        # transformers 5 renamed `torch_dtype` to `dtype`, but other software still reads `torch_dtype`
        fields |= model_folder.as_trained(trained, fields)
        fields |= {"dtype": of_torch, "torch_dtype": of_torch}
        write_json(partial / "config.json", fields)
        model_folder.write_generation_config(partial, like, fields, trained)
        num_values = sum(math.prod(entry.shape) for entry in weights.entries)
        facts = f"`{name}`, {num_values:,} parameters, weights in {of_torch}"
        iteration = iteration_of(folder, read_common(folder))
        of_run: dict[str, Any] = {"source": folder, "iteration": iteration, "original": original}
        model_folder.write_model_card(partial, target.name, facts, **of_run)
    notes = []
    if not has_tokenizer:
        named = config.tokenizer
        why = f"TOKENIZER={named} not found" if named else "the checkpoint names no tokenizer"
        fix = "pass --tokenizer, or copy the tokenizer's files into the folder"
        notes.append(f"no tokenizer was written: {why}; {fix}")
    if added := config.padded_vocab_size - config.vocab_size:
        notes.append(f"omitted {added} vocabulary padding rows, which were part of the softmax in training")
    return Exported(name, weights.num_bytes, tuple(notes))


def fields_of(config: Config, architecture: Architecture) -> dict[str, Any]:
    """Fields of a model's config.json, except dtype and token ids."""
    fields: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    for rule in architecture.fields:
        fields |= rule.write(config)
    return fields | {"use_cache": True}


class _Weights:
    """Tensors to export from a checkpoint; raises ValueError if any is missing, unused or misshapen."""

    def __init__(
        self, reader: CheckpointReader, planned: list[MappedPiece], *, main: bool, dtype: torch.dtype | None
    ):
        self.reader, self.dtype = reader, dtype
        name = f"checkpoint={reader.folder}"
        if main and not any(key.startswith(_MAIN) for key in reader.tensors):
            raise unusable(name, "has no fp32 main weights", "omit --weights main")
        self._kept: tuple[str, tuple[int, ...], Tensor] | None = None
        needed = {piece.key: piece.shape for piece in planned if piece.key}
        self.stored: dict[str, StoredTensor] = {}  # by our key
        for prefix, key in product((*_MAIN, "") if main else ("",), needed):
            if prefix + key in reader.tensors:
                self.stored.setdefault(key, reader.tensors[prefix + key])
        found = {key: stored.shape for key, stored in self.stored.items()}
        others = set(weight_keys(reader.tensors)) - set(needed)
        unused = sorted(key for key in others if not key.endswith(LOSS_STATE))
        if lists := misfits(needed, found, unused):
            # Keys for single layers or experts are another Megatron-LM style, which `ckpt reshape` converts.
            fix = "use another checkpoint of the run"
            single_layers, single_experts = single_styles(unused)
            # dense and MoE layers cannot be stacked
            are_single, _ = single_styles(needed)
            if single_experts or (single_layers and not are_single):
                layers = "single" if are_single else "stacked"
                options = ["--weights-only", "--layers", layers, "--experts", "stacked"]
                source = str(reader.folder)
                command = [*own_command(), "ckpt", "reshape", source, f"{source}_stacked", *options]
                fix = f"convert the checkpoint's keys first: {shlex.join(command)}"
            raise unusable(name, f"tensors {lists}", fix)

        self.usual_dtype = dtype or self.stored[planned[0].key].dtype  # dtype of most written weights
        self.entries = [  # all tensors to write, in order
            model_folder.Entry(part.name, part.shape, self.dtype_of(piece, part))
            for piece in planned
            for part in piece.theirs
        ]
        self.num_bytes = sum(entry.num_bytes for entry in self.entries)

    def dtype_of(self, piece: MappedPiece, part: Theirs) -> torch.dtype:
        """Dtype in which a tensor is written."""
        stored = self.stored.get(piece.key)
        # Rounding the bias would change which experts are chosen; transformers always keeps it in fp32.
        if part.name.endswith(("e_score_correction_bias", "expert_bias")):
            return torch.float32 if stored is None else stored.dtype
        return self.usual_dtype if stored is None else self.dtype or stored.dtype

    def values(self, piece: MappedPiece) -> Tensor:
        """Reads a piece's values. Reads all experts of a layer at once, since they may share one chunk."""
        stored = self.stored[piece.key]
        num_axes = len(piece.theirs[0].shape) - (piece.join == "flat") + (piece.expert is not None)
        num_layer_axes = len(piece.shape) - num_axes
        layer, rest = piece.offsets[:num_layer_axes], piece.shape[num_layer_axes:]
        if self._kept is None or self._kept[:2] != (stored.key, layer):
            # freed before the next tensor is read, so that only one is in memory
            self._kept = None
            values = self.reader.read(stored.key, (*layer, *(0,) * len(rest)), ((1,) * num_layer_axes + rest))
            self._kept = stored.key, layer, values.view(rest)
        return self._kept[2] if piece.expert is None else self._kept[2][piece.expert]

    def parts(self, piece: MappedPiece, config: Config) -> Iterator[Tensor]:
        """Yields the Hugging Face tensors built from `piece`, one at a time."""
        shapes = [part.shape for part in piece.theirs]
        # Tensors that only the Hugging Face model has are zeros, which have no effect.
        parts: Iterable[Tensor] = map(torch.zeros, shapes)
        if piece.key:
            ours = self.values(piece)
            ours = ours if piece.factor == 1 else ours.float() * piece.factor
            parts = taken_apart(piece.join, ours, shapes, config)
        for part, values in zip(piece.theirs, parts, strict=True):
            yield values.to(self.dtype_of(piece, part))


def _tokenizer_of(config: Config, folder: Path) -> Path | None:
    named = config.tokenizer
    if not named:
        # A run on prepared text finds the tokenizer next to the text.
        with contextlib.suppress(ValueError):
            named = find_prepared_text(config, saved_order(folder).get("tokenizer") or "").tokenizer
    paths = [Path(named)] if named else []
    if not (named or config.train_data):
        paths.append(embedded_folder(Path(config.data_dir)) / "tokenizer.json")
    return next((path for path in (*paths, folder.parent / "tokenizer") if path.exists()), None)


@dataclass(frozen=True)
class Trait:
    """A model property that only some architectures can express."""

    of: Callable[[Config], Any]  # value for a model
    usual: Any  # the only value that an architecture allows, unless its `traits` list others
    settings: tuple[str, ...]  # settings that determine the value, for error messages
    note: str = ""


def _attention(c: Config) -> str:
    if not c.multi_latent_attention:
        return "grouped"
    kind = "latent" if c.q_lora_rank else "latent, queries whole"
    return kind if c.qk_norm else "latent, without norms"


def _moe_layers(c: Config) -> str:
    layers = c.moe_layers
    if not any(layers):
        return "none"
    if all(layers):
        return "all"
    return "after the first" if all(layers[layers.index(True) :]) else "mixed"


def _routing(c: Config) -> str:
    if not c.use_moe:
        return "none"
    if c.aux_loss_type == "sinkhorn":
        return "sinkhorn"
    if c.force_routing != "none":
        return c.force_routing
    # With TOPK=NUM_EXPERTS, softmax weights need no normalization.
    if c.router_score == "softmax" and c.topk == c.num_experts:
        return "softmax over all"
    return c.router_score + (", normalized" if c.router_weights_sum is not None else "")


def _shared(c: Config) -> str:
    if not c.use_moe or not c.shared_expert_size:
        return "none"
    if c.shared_expert_gate:
        return "gated"
    if c.shared_expert_size == c.expert_ffn_size:
        return "as an expert"
    return "of another width" if c.shared_expert_size % c.expert_ffn_size else "of whole experts"


def _windows(c: Config) -> str:
    windowed, rotated = c.window_layers, [not lacks_it for lacks_it in c.layers_without_rotary]
    with_dense = [has_window or not moe for has_window, moe in zip(windowed, c.moe_layers, strict=True)]
    if all(rotated):
        some = "some, others dense" if all(with_dense) else "some"
        return "all" if all(windowed) else some if any(windowed) else "none"
    return "rotated" if rotated == windowed else "rotated, and dense" if rotated == with_dense else "mixed"


def _multipliers(c: Config) -> str:
    others = (c.residual_multiplier, c.attention_multiplier)
    if others != (1, 0) or 1 not in (c.embedding_multiplier, c.logits_scaling):
        return "any"
    if c.embedding_multiplier == 1:
        return "none" if c.logits_scaling == 1 else "of logits"
    return "of embeddings" if math.isclose(c.embedding_multiplier**2, c.hidden_size) else "any"


TRAITS: Mapping[str, Trait] = {
    "normalization": Trait(
        lambda c: c.normalization + ", biases" * (c.normalization == "LayerNorm" and c.norm_bias),
        "RMSNorm", ("normalization", "norm_bias"),
    ),
    "activation": Trait(lambda c: c.activation, "swiglu", ("activation",)),
    "biases": Trait(lambda c: c.add_bias_linear, False, ("add_bias_linear",)),
    # With a capacity of all tokens in a micro-batch, an expert can never overflow.
    "drops": Trait(
        lambda c: c.use_moe and (c.expert_capacity_factor or math.inf) * c.topk < c.num_experts, False,
        ("moe_type", "capacity_factor"), ", which may drop tokens,",
    ),
    "attention": Trait(_attention, "grouped", ("multi_latent_attention", "qk_norm", "q_lora_rank")),
    "qk_norm": Trait(
        lambda c: c.qk_norm_scope if c.qk_norm and not c.multi_latent_attention else "none", "none",
        ("qk_norm", "qk_norm_scope"),
    ),
    "qkv_bias": Trait(lambda c: c.qkv_bias, False, ("qkv_bias",)),
    "heads_fill_width": Trait(
        lambda c: c.multi_latent_attention or c.kv_channels * c.num_heads == c.hidden_size, True,
        ("head_dim", "hidden_size", "num_heads"),
    ),
    # `rotated`: layers with a window, and no others, have a rotary embedding
    "windows": Trait(_windows, "none", ("sliding_window", "window_pattern", "rotary_layers")),
    "window_base": Trait(
        lambda c: (
            "none" if not c.window_rotary_base else "plain" if c.rope_scaling == "none" else "beside scaling"
        ),
        "none", ("window_rotary_base", "rope_scaling"),
    ),
    "sinks": Trait(
        lambda c: "all" if all(c.sink_layers) else "some" if any(c.sink_layers) else "none", "none",
        ("attention_sinks", "window_pattern"),
    ),
    "value_heads": Trait(lambda c: c.value_head_dim > 0, False, ("value_head_dim",)),
    "value_scale": Trait(lambda c: c.value_scale != 1, False, ("value_scale",)),
    "window_groups": Trait(
        lambda c: (c.window_query_groups or c.num_query_groups) / c.num_query_groups, 1,
        ("num_query_groups", "window_query_groups"),
    ),
    "softcap": Trait(lambda c: bool(c.attention_softcap), False, ("attention_softcap",)),
    "gate": Trait(lambda c: c.attention_gate, False, ("attention_gate",)),
    "rotates_whole_heads": Trait(lambda c: c.rotary_fraction == 1, True, ("rotary_fraction",)),
    # YaRN needs both mscale factors or neither
    "rope": Trait(
        lambda c: c.rope_scaling != "yarn"
        or (c.yarn_mscale > 0 if c.yarn_mscale_all_dim else c.yarn_mscale == 1),
        True, ("rope_scaling", "yarn_mscale", "yarn_mscale_all_dim"),
    ),
    "epsilon": Trait(
        lambda c: (c.qk_norm_epsilon or c.norm_epsilon)
        == (LATENT_EPSILON if c.multi_latent_attention else c.norm_epsilon),
        True, ("norm_epsilon", "qk_norm_epsilon"),
    ),
    "norm_placement": Trait(lambda c: shape_facts(c)["norm_placement"], "pre", ("norm_placement",)),
    "multipliers": Trait(
        _multipliers, "none",
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    ),
    "moe_layers": Trait(_moe_layers, "all", ("use_moe", "moe_layer_freq", "first_k_dense")),
    "mtp": Trait(
        lambda c: ("MoE" if c.moe_layers[-1] else "dense") if c.mtp_num_layers else "none", "none",
        ("mtp_num_layers",),
    ),
    "routing": Trait(
        _routing, "softmax",
        ("router_score", "router_pre_softmax", "router_normalize", "aux_loss_type", "force_routing"),
    ),
    "expert_bias": Trait(lambda c: c.use_moe and c.has_expert_bias, False, ("router_bias_update_rate",)),
    "groups": Trait(
        lambda c: c.use_moe
        and group_ranking(c.topk, c.num_router_groups, c.router_group_topk, c.router_group_best),
        0, ("topk", "num_router_groups", "router_group_topk", "router_group_best"),
    ),
    "number": Trait(
        lambda c: c.use_moe and (c.router_top_p < 1 or c.null_experts > 0), False,
        ("router_top_p", "null_experts"),
    ),
    "latent": Trait(lambda c: c.use_moe and c.moe_latent_size > 0, False, ("moe_latent_size",)),
    "shared": Trait(_shared, "none", ("shared_expert_size", "shared_expert_gate")),
}  # fmt: skip


def choose_architecture(config: Config, preferred: Collection[str] = ()) -> Architecture:
    """Architecture that is equivalent to the model, preferably one named in `preferred`. Raises
    UnsupportedModel if no architecture is equivalent; its message names the settings that prevent the export.
    """
    against: dict[str, list[str]] = {}  # settings that each architecture cannot express
    for architecture in sorted(ARCHITECTURES.values(), key=lambda one: one.name not in preferred):
        reasons = against[architecture.name] = []
        of_fields = chain.from_iterable(rule.traits.items() for rule in architecture.fields)
        allowed = dict(of_fields) | dict(architecture.traits)
        for name, trait in TRAITS.items():
            if trait.of(config) not in allowed.get(name, (trait.usual,)):
                values = (f"{setting.upper()}={getattr(config, setting)}" for setting in trait.settings)
                reasons.append(" ".join(values) + trait.note)
        if not reasons:
            return architecture
    fewest = min(len(reasons) for reasons in against.values())
    nearest = {name: reasons for name, reasons in against.items() if len(reasons) == fewest}
    first = next(iter(nearest.values()))
    # A reason that rules out every architecture explains more than the list for the nearest ones.
    if by_none := [reason for reason in first if all(reason in reasons for reasons in against.values())]:
        what = f"{', '.join(by_none)}: no supported transformers architecture can express this"
    else:
        each = "; ".join(f"{name} does not support {', '.join(reasons)}" for name, reasons in nearest.items())
        what = f"model: no supported transformers architecture is equivalent ({each})"
    raise UnsupportedModel(f"{what}. Fix: train with the settings listed in docs/huggingface.md.")


def exports_as(config: Config) -> str | None:
    """Name of the transformers class to which a model can be exported; None if there is no such class."""
    try:
        return choose_architecture(config).name
    except UnsupportedModel:
        return None
