"""Checkpoints of a small model, written chunk by chunk in this package's style, without ranks."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from moe_exp.checkpoint.format.folders import MANIFEST, Manifest, entry_of, iteration_folder
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.runs.run_folder import LATEST

LAYERS, EXPERTS, HIDDEN, EXPERT_HIDDEN, VOCAB = 2, 4, 8, 6, 16
CONFIG: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_heads": 2, "num_experts": EXPERTS, "topk": 2,
    "seq_len": 32, "dtype": "bf16", "tp": 1, "pp": 1, "vpp": None, "ep": 1, "etp": 1, "cp": 1,
    "activation": "swiglu", "normalization": "RMSNorm",
}  # fmt: skip
STACKED = {
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, 3 * HIDDEN, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HIDDEN),
    "decoder.layers.pre_mlp_layernorm.weight": (LAYERS, HIDDEN),
    "decoder.layers.mlp.router.weight": (LAYERS, EXPERTS, HIDDEN),
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": (LAYERS, EXPERTS, 2 * EXPERT_HIDDEN, HIDDEN),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": (LAYERS, EXPERTS, HIDDEN, EXPERT_HIDDEN),
}
WHOLE = {
    "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (VOCAB, HIDDEN),
}
BIAS, ROUTER = "decoder.layers.mlp.router.expert_bias", "decoder.layers.mlp.router.weight"
STATES = ("param", "exp_avg", "exp_avg_sq")


def common_state(iteration: int) -> dict[str, Any]:
    """common.pt as a run writes it, as far as the commands look at it."""
    return {
        "config": CONFIG,
        "layout": {"tp": 1, "pp": 1, "device": "cpu"},
        "progress": {
            "iteration": iteration, "consumed_samples": 8 * iteration, "skipped_iterations": 0,
            "sample_order": {"seed": 1234},
        },
        "scheduler": {"max_lr": 0.001, "num_steps": 8 * iteration},
        "optimizer": {0: {"optimizer": {"param_groups": [{"lr": 0.001, "step": iteration}]}}},
        "content_metadata": {"singleton_local_shards": False},
    }  # fmt: skip


def drawn_state(seed: int = 0) -> dict[str, Tensor]:
    """bf16 weights, fp32 main weights that round to them, moments, and the fp32 expert bias, by key."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {BIAS: torch.randn(LAYERS, EXPERTS, generator=generator)}
    for key, shape in (STACKED | WHOLE).items():
        for state in STATES:
            tensors[f"optimizer.state.{state}.{key}"] = torch.randn(shape, generator=generator)
        tensors[key] = tensors[f"optimizer.state.param.{key}"].bfloat16()
    return tensors


def add_tensor(writer: TorchDistWriter, key: str, values: Tensor) -> None:
    """Writes a whole tensor as one chunk."""
    writer.add_chunk(key, values, shape=tuple(values.shape), offsets=(0,) * values.dim())


def entries_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Manifest entries of a folder's files."""
    return {path.name: entry_of(path) for path in folder.iterdir() if path.name != MANIFEST}


def write_checkpoint(
    checkpoints: Path,
    iteration: int = 5,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    common: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    manifest: bool = True,
    latest: bool = True,
) -> Path:
    """Writes one checkpoint, a chunk for every layer of a stacked tensor, and returns its folder."""
    folder = iteration_folder(checkpoints, iteration)
    writer = TorchDistWriter(folder)
    for key, values in (drawn_state() if tensors is None else tensors).items():
        for offsets, chunk in _chunks(key, values):
            writer.add_chunk(key, chunk, shape=tuple(values.shape), offsets=offsets)
    qkv, fc1 = "decoder.layers.self_attention.linear_qkv", "decoder.layers.mlp.experts.experts.linear_fc1"
    for layer in range(LAYERS):
        writer.add_object(f"{qkv}._extra_state/shard_{layer}_{LAYERS}", None)
        for expert in range(EXPERTS):
            writer.add_object(f"{fc1}._extra_state/shard_{layer}.{expert}_{LAYERS}.{EXPERTS}", None)
    writer.add_object("rng_state/shard_0.0_1.1", {"cpu": torch.arange(4)})
    writer.finish(dict(common_state(iteration) if common is None else common))
    if manifest:
        Manifest(iteration, entries_of(folder), dict(facts or {})).write(folder)
    if latest:
        (checkpoints / LATEST).write_text(str(iteration))
    return folder


def _chunks(key: str, values: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    parts = values.split(1) if "decoder.layers." in key else [values]
    for layer, part in enumerate(parts):
        yield (layer, *[0] * values.dim())[: values.dim()], part


def flip_bit(path: Path, offset: int) -> None:
    """Changes one bit of a file, in place."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def flip_a_value(folder: Path) -> None:
    """Changes one bit of the router of layer 1, in a chunk of its own."""
    chunk = CheckpointReader(folder).tensors[ROUTER].chunks[1]
    content = (folder / chunk.file).read_bytes()[chunk.start : chunk.start + chunk.num_bytes]
    values = drawn_state()[ROUTER][1].contiguous().view(torch.uint8).numpy().tobytes()
    flip_bit(folder / chunk.file, chunk.start + content.index(values) + 20)


def write_without_tensors(folder: Path, common: dict[str, Any] | None = None) -> None:
    """A whole checkpoint in `folder` that has no tensors, as far as it is looked at before a start."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(common or {}, folder / "common.pt")
    (folder / "metadata.json").write_text("{}")
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={}, storage_data={})))
