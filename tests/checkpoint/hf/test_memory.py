"""Conversions hold one file of safetensors and one layer in memory at most, however large the model is."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.checkpoint.peak import peak_bytes
from helpers.ranks import run_on_ranks
from moe_exp.checkpoint.hf.exporting import fields_of, to_hf
from moe_exp.checkpoint.hf.families_attention import ARCHITECTURES
from moe_exp.checkpoint.hf.importing import from_hf, settings_of
from moe_exp.checkpoint.hf.model_folder import Entry, write_shards
from moe_exp.checkpoint.hf.tensor_rules import pieces
from moe_exp.config import Config

LAYERS, SHARD_BYTES = 10, 60 * 10**6
FIELDS = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 12800, "rms_norm_eps": 1e-5,
}  # fmt: skip


def write_model(folder: Path) -> tuple[int, int]:
    """A random model of some hundred MB, drawn tensor by tensor; bytes of all, and of a layer."""
    architecture = ARCHITECTURES["MixtralForCausalLM"]
    config = Config(**settings_of(FIELDS, architecture))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields_of(config, architecture)))
    entries = [
        Entry(part.name, part.shape, torch.float32)
        for piece in pieces(architecture.tensors, config, scales=True)
        for part in piece.theirs
    ]
    tensors = (torch.randn(entry.shape) for entry in entries)
    write_shards(folder, entries, tensors, lambda num_bytes: None, max_bytes=SHARD_BYTES)
    layer_bytes = sum(entry.num_bytes for entry in entries if ".layers.0." in entry.name)
    return sum(entry.num_bytes for entry in entries), layer_bytes


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_peak(tmp_path, record_property):
    total_bytes, layer_bytes = write_model(tmp_path / "hf")
    largest = max(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    limit = 1.3 * largest + layer_bytes
    assert total_bytes > 4 * limit
    export = partial(to_hf, max_shard_bytes=SHARD_BYTES)
    (read,) = run_on_ranks(1, peak_bytes, from_hf, tmp_path / "hf", tmp_path / "ours", join=False)
    (written,) = run_on_ranks(1, peak_bytes, export, tmp_path / "ours", tmp_path / "back", join=False)
    record_property("bytes", {"model": total_bytes, "limit": limit, "from_hf": read, "to_hf": written})
    assert read < limit and written < limit
    for path in (tmp_path / "hf").glob("*.safetensors"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
