"""Converts Hugging Face folders to checkpoints in one process. Only one tensor at a time is in memory."""

import json
import logging
import math
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint.format import folders
from moe_exp.checkpoint.format.folders import unusable
from moe_exp.checkpoint.format.settings import config_of
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.checkpoint.hf import model_folder, tensor_rules
from moe_exp.checkpoint.hf.families import Architecture
from moe_exp.checkpoint.hf.families_attention import ARCHITECTURES, OTHER_TYPES
from moe_exp.checkpoint.hf.fields import Settings, UnsupportedModel, refuse
from moe_exp.checkpoint.hf.model_folder import DTYPES, TORCH_DTYPES, Advance, ModelFolder, is_mxfp4
from moe_exp.checkpoint.state import CONTENT
from moe_exp.config import Config
from moe_exp.config.setting_types import as_given
from moe_exp.host.files import write_atomically
from moe_exp.host.processes import own_command
from moe_exp.host.progress import progress
from moe_exp.runs.run_folder import LATEST

logger = logging.getLogger(__name__)

SETTINGS = "settings.env"
# Written explicitly, so that no machine's preset decides. Pretraining rates are about ten times as high.
_CONTINUED: Settings = {
    "preset": "reference", "optimizer": "adam", "lr": 3e-5, "min_lr": 3e-6, "lr_decay_style": "cosine"
}  # fmt: skip
_LAYOUT = ("tp", "pp", "vpp", "ep", "etp", "cp")
_NO_PREDICTION = "MTP_NUM_LAYERS=0: the num_nextn_predict_layers={} layers are missing from the weights"
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_COUNTS = (
    "num_hidden_layers", "num_local_experts", "num_experts", "n_routed_experts", "num_nextn_predict_layers",
    "num_mtp_layers",
)  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Fields of config.json that do not affect the model's output in evaluation.
_WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "attention_dropout", "aux_loss_alpha", "bos_token_id", "dtype",
    "eod_token_id", "eos_token_id", "id2label", "is_encoder_decoder", "label2id", "model_type",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "return_dict", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "seq_aux",
    "torch_dtype", "transformers_version", "transformers_weights", "unsloth_fixed", "use_cache",
    "chunk_size_feed_forward", "problem_type", "num_nextn_predict_layers", "num_mtp_layers", "resid_pdrop",
    "embd_pdrop", "initializer_cutoff_factor", "sep_token_id", "tokenizer_class", "finetuning_task",
    "task_specific_params", "tie_encoder_decoder", "torchscript", "is_decoder", "add_cross_attention",
    "cross_attention_hidden_size", "prefix", "_commit_hash", "_attn_implementation_autoset",
    "attn_implementation", "_from_model_config", "moe_router_activation_func",
}  # fmt: skip

# Plainest value of every setting that affects the computation, before the rules; presets are not used.
_PLAIN: Settings = {
    "use_moe": True, "moe_type": "dmoe", "capacity_factor": 0.0, "min_capacity": 0, "moe_layer_freq": "1",
    "first_k_dense": 0, "moe_ffn_hidden_size": 0, "shared_expert_size": 0, "shared_expert_gate": False,
    "moe_latent_size": 0, "router_score": "softmax", "router_pre_softmax": True, "router_normalize": "auto",
    "router_scaling_factor": 1.0, "router_bias_update_rate": 0.0, "num_router_groups": 0,
    "router_group_topk": 0, "router_group_best": 0, "force_routing": "none", "aux_loss_type": "aux_loss",
    "activation": "swiglu", "normalization": "RMSNorm", "add_bias_linear": False, "qk_norm": False,
    "qk_norm_scope": "head", "qk_norm_epsilon": 0.0, "qkv_bias": False, "multi_latent_attention": False,
    "head_dim": 0, "norm_placement": "pre", "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 0.0, "logits_scaling": 1.0, "sliding_window": 0, "window_pattern": "1",
    "rotary_layers": "1", "window_rotary_base": 0.0, "attention_sinks": "none", "attention_softcap": 0.0,
    "attention_gate": False, "norm_bias": True, "window_query_groups": 0, "value_head_dim": 0,
    "value_scale": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    config: Config  # the model's settings; launch settings have their defaults
    architecture: str  # transformers class
    command: str  # command that trains from this checkpoint
    notes: tuple[str, ...]  # lines for the user


# Pieces with the tensors to read for each: name, and index if one tensor contains all experts.
_Sources = list[tuple[tensor_rules.MappedPiece, list[tuple[str, int | None]]]]


def from_hf(
    source: Path, target: Path, *, dtype: str | None = None, drop_mtp: bool = False,
    ignore_fields: Collection[str] = (), origin: str = "",
) -> Imported:  # fmt: skip
    """Writes a weights-only checkpoint with the weights of a Hugging Face folder.

    Args:
        source: folder with config.json and safetensors files.
        target: checkpoints folder to create, with iter_0000000, tokenizer, and settings.env for the next run.
        dtype: dtype of the written weights, `fp32`, `bf16` or `fp16`; None: unchanged.
        drop_mtp: omit the layers for multi-token prediction (MTP_NUM_LAYERS=0).
        ignore_fields: unsupported fields of config.json to ignore.
        origin: where the folder was downloaded from, `hf://OWNER/NAME@COMMIT`; recorded for the export.

    Raises:
        ValueError: if a file, tensor or field is missing, unused or unsupported, or if a shape is wrong.
            After an error, no files remain.
    """
    folders.check_target(target)
    folder = ModelFolder(source)
    architecture = architecture_of(folder.config)
    _check_counts(folder)
    settings = settings_of(folder.config, architecture, ignore=ignore_fields)
    predicting = range(settings["num_layers"], settings["num_layers"] + settings.get("mtp_num_layers", 0))
    predicts = any((layer := _LAYER.match(name)) and int(layer[1]) in predicting for name in folder.weights)
    if drop_mtp or not predicts:
        settings.pop("mtp_num_layers", None)
    config = config_of(settings, "config.json", "correct the config.json")
    # Refuses models that a run would refuse. The data settings are placeholders, since the next run sets
    # them. The fixes are dropped: they propose settings, but here config.json determines the settings.
    if problems := list(config.model_copy(update={"train_data": "data", "valid_data": "data"}).problems()):
        rules = [line.partition(" Fix: ")[0] for line in problems]
        says = [f"{folder.path}: config.json results in {rule} Fix: convert another model." for rule in rules]
        raise ValueError("\n".join(says))
    sources, source_bytes = _match(folder, architecture, config, predicting)
    added = model_folder.tokens_beyond(folder.path, config.vocab_size)
    settings |= {"vocab_size": config.vocab_size + len(added)}
    config = config.model_copy(update={"vocab_size": settings["vocab_size"]})
    for number, (piece, reads) in enumerate(sources):
        # vocabulary tables, which may have grown
        if piece.join == "padded":
            shape = tensor_rules.joined_shape("padded", [part.shape for part in piece.theirs], config)
            sources[number] = replace(piece, shape=shape, box=shape), reads
    stored = _dtype(folder, sources, dtype)
    config = config.model_copy(update={"dtype": model_folder.DTYPE_NAMES[stored]})
    num_bytes = sum(math.prod(piece.box) for piece, _ in sources) * stored.itemsize if dtype else source_bytes
    with (
        folders.new_folder(target, num_bytes=num_bytes) as partial,
        progress("converting", source_bytes) as advance,
    ):
        (original := partial / model_folder.ORIGINAL).mkdir()
        model_folder.copy_files(source, original, model_folder.DESCRIPTION)
        if origin:
            write_atomically(original / model_folder.ORIGIN, f"{origin}\n")
        if model_folder.copy_tokenizer(source, partial / "tokenizer"):
            config = config.model_copy(update={"tokenizer": str(target.resolve() / "tokenizer")})
        else:
            logger.warning("%s: tokenizer.json not found; settings.env has no TOKENIZER", source)
        written = folders.iteration_folder(partial, 0)
        entries = _write_weights(folder, sources, written, config, dtype, advance)
        layout = {name: getattr(config, name) for name in _LAYOUT}
        facts = {"converted_from": architecture.name, "world_size": 1, "layout": layout}
        folders.Manifest(0, entries, facts).write(written)
        write_atomically(partial / LATEST, "0")
        # for the model, its weights and further training; no preset changes these settings
        values = settings | {"dtype": config.dtype, "tokenizer": config.tokenizer}
        values |= {"load_dir": str(target.resolve())} | _CONTINUED
        lines = ["# Settings for further training of this checkpoint: moe-exp train --config THIS_FILE"]
        lines += [f"{k.upper()}={shlex.quote(as_given(value))}" for k, value in values.items() if value != ""]
        write_atomically(partial / SETTINGS, "\n".join(lines) + "\n")
    command = shlex.join([*own_command(), "train", "--config", str(target.resolve() / SETTINGS)])
    notes = [] if predicts or not predicting else [_NO_PREDICTION.format(len(predicting))]
    return Imported(config, architecture.name, command, (*notes, *_notes(config, added)))


def architecture_of(fields: Mapping[str, Any]) -> Architecture:
    """Architecture that a config.json names; raises UnsupportedModel if it is not supported."""
    names = fields.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refuse("architectures", names, "must be a list of class names", "correct the config.json")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES.values()} | OTHER_TYPES
    if not names and fields.get("model_type") in by_type:
        return by_type[fields["model_type"]]
    fix = f"convert one of {', '.join(ARCHITECTURES)}"
    raise refuse("architectures", ",".join(names) or "(missing)", "is not supported", fix)


def settings_of(
    fields: Mapping[str, Any], architecture: Architecture, *, ignore: Collection[str] = ()
) -> Settings:
    """All settings of the model; raises UnsupportedModel for the first unsupported field not in `ignore`."""
    is_read = architecture.name == "GptOssForCausalLM" and is_mxfp4(fields)
    if fields.get("quantization_config") and "quantization_config" not in ignore and not is_read:
        how = fields["quantization_config"]
        method = how.get("quant_method", "some method") if isinstance(how, dict) else how
        fix = "convert weights in bf16, fp16 or fp32"
        raise refuse("quantization_config", method, "quantized weights are not supported", fix)
    if fields.get("auto_map") and "auto_map" not in ignore:
        fix = f"if that code is equivalent to transformers' {architecture.name}, pass --ignore-field auto_map"
        raise refuse("auto_map", "{...}", "the model has its own code, which is never executed", fix)
    known = {name for rule in architecture.fields for name in rule.names} | _WITHOUT_EFFECT
    known |= {"quantization_config", "auto_map"}
    for name, value in sorted(fields.items()):
        if name not in known and name not in ignore and value not in (None, False, 0, "", [], {}):
            fix = f"if it does not affect the model's output, pass --ignore-field {name}"
            raise refuse(name, value, f"is unknown for {architecture.name}", fix)
    # Adds the configuration class's defaults, and replaces null by its meaning.
    completed = dict(architecture.defaults)
    for name, value in fields.items():
        if name in ignore:
            continue
        if value is None and architecture.defaults.get(name) is not None and name not in architecture.null:
            rule = f"must not be null for {architecture.name}"
            raise refuse(name, "null", rule, f"omit it to use {json.dumps(architecture.defaults[name])}")
        completed[name] = architecture.null.get(name) if value is None else value
    settings = _PLAIN | dict(architecture.settings)
    for of_fields in architecture.fields:
        try:
            settings |= of_fields.read(completed)
        except UnsupportedModel:
            raise
        except (TypeError, ValueError, AttributeError, ZeroDivisionError, IndexError) as error:
            reason = f"{', '.join(of_fields.names)}: cannot be read ({error})"
            raise UnsupportedModel(f"config.json: {reason}. Fix: correct the config.json.") from None
    return settings if settings["use_moe"] else settings | {"moe_layer_freq": "1"}


def _check_counts(folder: ModelFolder) -> None:
    """Refuses more layers or experts than the folder's tensors allow. Call before generating tensor names."""
    rows = (weight.shape[0] for weight in folder.weights.values() if weight.shape)
    most = max(1024, len(folder.weights), *rows)
    for name in _COUNTS:
        value = folder.config.get(name)
        if not isinstance(value, int | None):
            raise refuse(name, value, "must be a whole number", "correct the config.json")
        if value is not None and value > most:
            rule = f"{name}={value}: is more than the folder's tensors allow"
            raise unusable(folder.path, rule, "use the config.json that belongs to the weights")


def _match(
    folder: ModelFolder, architecture: Architecture, config: Config, predicting: range
) -> tuple[_Sources, int]:
    """Returns the tensors to import and their total bytes. Refuses wrong shapes and unused tensors.

    `predicting`: the multi-token prediction layers, which are skipped if MTP_NUM_LAYERS=0.
    """
    planned: _Sources = []
    needed: dict[str, tuple[int, ...]] = {}
    copies = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_embeddings else {}
    for piece in tensor_rules.pieces(architecture.tensors, config, scales=architecture.scales):
        if piece.copy_of:
            copies[piece.theirs[0].name] = piece.copy_of
        elif piece.key and piece.alias in folder.weights:
            shape = piece.theirs[0].shape
            if piece.join != "flat":
                shape = tensor_rules.joined_shape(piece.join, [part.shape for part in piece.theirs], config)
            needed[piece.alias] = shape if piece.expert is None else (config.num_experts, *shape)
            planned.append((piece, [(piece.alias, piece.expert)]))
        elif piece.key:
            needed |= {part.name: part.shape for part in piece.theirs}
            for one, index in tensor_rules.by_expert(piece):
                planned.append((one, [(part.name, index) for part in piece.theirs]))
    # All remaining tensors must be without effect or explicitly dropped by the caller.
    unused = []
    for name in sorted(set(folder.weights) - set(needed)):
        layer = _LAYER.match(name)
        if original := copies.get(name):
            if original in folder.weights and not torch.equal(folder.read(name), folder.read(original)):
                rule = f"{name} differs from {original}"
                if layer:
                    rule += ", which multi-token prediction shares"
                    raise unusable(folder.path, rule, "pass --drop-mtp to omit its layers")
                fix = "set tie_word_embeddings to false in config.json"
                raise unusable(folder.path, f"tie_word_embeddings=true, but {rule}", fix)
        elif layer and int(layer[1]) in predicting and not config.mtp_num_layers:
            continue
        elif not _COMPUTED.fullmatch(name) and not any(
            re.fullmatch(pattern, name) and tensor_rules.CONDITIONS[when](config)
            for pattern, when in architecture.without_effect.items()
        ):
            unused.append(name)
    found = {name: folder.weights[name] for name in sorted(needed) if name in folder.weights}
    types = [f"{name} {weight.dtype}" for name, weight in found.items() if weight.dtype not in DTYPES]
    shapes = {name: weight.shape for name, weight in found.items()}
    if wrong := tensor_rules.misfits(dict(sorted(needed.items())), shapes, unused, types):
        fix = "use the config.json that belongs to the weights, or download them again"
        raise unusable(folder.path, f"tensors {wrong}", fix)
    return planned, sum(math.prod(one.shape) * DTYPES[one.dtype].itemsize for one in found.values())


def _dtype(folder: ModelFolder, sources: _Sources, dtype: str | None) -> torch.dtype:
    """DTYPE for training; default: the embedding's. Without `dtype`, tensors to join must share one dtype."""
    if dtype is not None:
        return TORCH_DTYPES[dtype]
    by_key: dict[str, set[str]] = {}
    for piece, reads in sources:
        by_key.setdefault(piece.key, set()).update(folder.weights[name].dtype for name, _ in reads)
    if mixed := min((key for key, types in by_key.items() if len(types) > 1), default=""):
        rule = f"{mixed} would mix tensors of several types ({', '.join(sorted(by_key[mixed]))})"
        raise unusable(folder.path, rule, "convert all tensors with --dtype bf16, fp16 or fp32")
    (found,) = by_key[sources[0][0].key]
    return DTYPES[found]


def _write_weights(
    folder: ModelFolder, sources: _Sources, written: Path, config: Config, dtype: str | None, advance: Advance
) -> dict[str, dict[str, Any]]:
    """Writes the files of a checkpoint and returns their manifest entries."""
    layout = {"tp": 1, "pp": 1, "device": "cpu"}
    with TorchDistWriter(written) as writer:
        for piece, reads in sources:
            parts = [folder.read(name, index) for name, index in reads]
            advance(sum(part.numel() * part.element_size() for part in parts))
            # One tensor may already contain all parts in joined form (`TensorRule.alias`).
            values = (
                parts[0] if len(parts) < len(piece.theirs) else tensor_rules.joined(piece.join, parts, config)
            )
            # Rounding expert_bias would change which experts are chosen.
            if dtype is not None and not piece.key.endswith("router.expert_bias"):
                values = values.to(TORCH_DTYPES[dtype])
            writer.add_chunk(piece.key, values.view(piece.box), shape=piece.shape, offsets=piece.offsets)
        return writer.finish({"config": config.model_dump(), "layout": layout, "content_metadata": CONTENT})


def _notes(config: Config, added: list[str]) -> list[str]:
    notes = []
    if config.seq_len > 8192:  # longer than usual
        published = f"SEQ_LEN={config.seq_len} is the model's published length"
        notes.append(f"{published}; pass --seq-len to train with another length")
    if added:
        what = f"the tokenizer has {len(added)} added tokens without embeddings, {folders.first_few(added)}"
        notes.append(f"VOCAB_SIZE={config.vocab_size}: {what}; each starts from the mean of all embeddings")
    if padding := config.padded_vocab_size - config.vocab_size:
        rows = f"VOCAB_SIZE={config.vocab_size} is not a multiple of 128: added {padding} rows of zeros"
        notes.append(f"{rows}; their logits of 0 count in the softmax until training lowers them")
    balances = ("aux_loss_type", "aux_loss_coeff", "z_loss_coeff", "router_bias_update_rate")
    balancing = " ".join(f"{name.upper()}={getattr(config, name)}" for name in balances)
    rates = f"LR={_CONTINUED['lr']} falling to MIN_LR={_CONTINUED['min_lr']}"
    of_model = f", and the load balancing from config.json: {balancing}" if config.use_moe else ""
    return [*notes, f"{SETTINGS} trains with AdamW, {rates}{of_model}"]
