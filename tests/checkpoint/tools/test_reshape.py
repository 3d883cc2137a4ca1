"""`moe-exp ckpt reshape`: the keys that Megatron asks for, bit for bit, within a bound of memory."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.ckpt_files import (
    BIAS,
    STACKED,
    WHOLE,
    add_tensor,
    drawn_state,
    flip_a_value,
    write_checkpoint,
)
from helpers.checkpoint.peak import peak_bytes
from helpers.ranks import free_port, run_on_ranks
from helpers.whole_runs import SMALL
from moe_exp.checkpoint.format.folders import latest_iteration, one_checkpoint
from moe_exp.checkpoint.format.keys import model_state, sharded_tensors
from moe_exp.checkpoint.format.settings import saved_order
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.checkpoint.integrity import Verification
from moe_exp.checkpoint.load import compare_model
from moe_exp.checkpoint.state import sharding_metadata, unwrapped
from moe_exp.checkpoint.tools.reshape import Reshaping, reshape
from moe_exp.cli import main
from moe_exp.config import Config, ConfigError, load_config
from moe_exp.engine import runtime
from moe_exp.engine.model import build_model

SIZES = ("tp", "pp", "vpp", "ep", "etp")
MODEL = {
    **SMALL, "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 20,
    "num_heads": 4, "gbsz": 8, "num_query_groups": 2, "seq_len": 16, "vocab_size": 200, "num_experts": 4,
    "topk": 2, "mbsz": 1, "dtype": "fp32", "gpus_per_node": 1,
}  # fmt: skip


def asked(settings: dict[str, Any], port: int) -> list[dict[str, tuple[int, ...]]]:
    """Key and shape of the tensors that a model asks a checkpoint for, in either style of experts."""
    config = load_config(settings, {})
    os.environ["MASTER_PORT"] = str(port)
    rank = runtime.start(config)
    (model,) = build_model(config, rank)
    found = []
    for singleton in (False, True):
        metadata = {**sharding_metadata(rank), "singleton_local_shards": singleton}
        shards = sharded_tensors(model_state(unwrapped(model), metadata))
        found.append({shard.key: tuple(shard.global_shape) for shard in shards})
    return found


@pytest.mark.parametrize(
    "model",
    [
        {"first_k_dense": 1, "shared_expert_size": 24, "qk_norm": True},
        {"activation": "gelu", "normalization": "LayerNorm", "tie_embeddings": True},
    ],
)
def test_the_keys_that_megatron_asks_for_in_either_style(model, tmp_path):
    (stacked, single), *_ = run_on_ranks(1, asked, MODEL | model, free_port(), join=False)
    whole = {key: torch.randn(shape) for key, shape in stacked.items()}
    whole |= {f"optimizer.state.exp_avg.{key}": torch.randn(shape) for key, shape in stacked.items()}
    writer = TorchDistWriter(tmp_path / "source")
    for key, values in whole.items():
        add_tensor(writer, key, values)
    writer.finish({})
    there = reshape(tmp_path / "source", tmp_path / "there", Reshaping(experts="single"))
    tensors = CheckpointReader(there.folder).tensors
    assert {key: s.shape for key, s in tensors.items() if "exp_avg" not in key} == single
    assert len(tensors) == 2 * len(single)
    again = {"layers": "single" if "first_k_dense" in model else "stacked", "experts": "stacked"}
    back = CheckpointReader(reshape(there.folder, tmp_path / "back", Reshaping(**again)).folder)
    assert set(back.tensors) == set(whole)
    assert all(torch.equal(back.read(key), values) for key, values in whole.items())


def test_there_and_back_is_the_same_values(tmp_path):
    source = write_checkpoint(tmp_path / "a")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()}
    there = reshape(source, tmp_path / "b", Reshaping(experts="single")).folder
    assert latest_iteration(tmp_path / "b") == 5
    assert list(Verification(there).findings()) == []
    back = reshape(there, tmp_path / "c", Reshaping(layers="stacked", experts="stacked")).folder
    a, b, c = (CheckpointReader(folder) for folder in (source, there, back))
    gated = "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight"
    assert b.tensors[f"{gated}_w"].shape == b.tensors[f"{gated}_v"].shape == (6, 8)
    assert set(c.tensors) == set(a.tensors)
    assert all(torch.equal(c.read(key), a.read(key)) for key in a.tensors)
    assert all(c.tensors[key].dtype == a.tensors[key].dtype for key in a.tensors)
    assert set(c.objects) == set(a.objects)
    assert (b.common()["content_metadata"], c.common()) == ({"singleton_local_shards": True}, a.common())
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()} == before


def test_bf16_needs_the_fp32_weights_that_the_optimizer_continues_from(tmp_path):
    tensors = {key: value for key, value in drawn_state().items() if ".state.param." not in key}
    source = write_checkpoint(tmp_path / "a", tensors=tensors)
    with pytest.raises(ValueError, match=r"^DTYPE=bf16: would lose the fp32 weights .*\. Fix: "):
        reshape(source, tmp_path / "b", Reshaping(dtype="bf16"))
    assert not (tmp_path / "b").exists()
    reshape(source, tmp_path / "b", Reshaping(dtype="bf16", weights_only=True))


def test_weights_only(tmp_path):
    """A start from them has their model, and any optimizer."""
    source = write_checkpoint(tmp_path / "a")
    reader = CheckpointReader(reshape(source, tmp_path / "b", Reshaping(weights_only=True)).folder)
    assert set(reader.tensors) == {*STACKED, *WHOLE, BIAS}
    assert set(reader.common()) == {"config", "content_metadata", "sample_order"}
    again = reshape(reader.folder, tmp_path / "c", Reshaping(weights_only=True)).folder
    assert saved_order(again) == saved_order(source) == {"seed": 1234}
    assert not any(key.startswith("rng_state") for key in reader.objects)
    folder, config = reader.folder, Config(**reader.common()["config"])
    assert folder.name == "iter_0000005"
    compare_model(config.model_copy(update={"optimizer": "muon"}), folder)
    other = config.model_copy(update={"rotary_base": 2e4})
    rule = rf"^ROTARY_BASE=20000.0: the checkpoint {re.escape(str(folder))} has .*ALLOW_OTHER_MODEL"
    with pytest.raises(ConfigError, match=rule):
        compare_model(other, folder)
    compare_model(other.model_copy(update={"allow_other_model": True}), folder)


def test_fp32_weights_are_the_main_weights(tmp_path):
    source, tensors = write_checkpoint(tmp_path / "a"), drawn_state()
    reader = CheckpointReader(reshape(source, tmp_path / "b", Reshaping(dtype="fp32")).folder)
    assert reader.common()["config"]["dtype"] == "fp32"
    half = CheckpointReader(reshape(reader.folder, tmp_path / "c", Reshaping(dtype="bf16")).folder)
    for key in (*STACKED, *WHOLE):
        assert torch.equal(reader.read(key), tensors[f"optimizer.state.param.{key}"])
        assert torch.equal(half.read(key), tensors[key])
    assert torch.equal(half.read(BIAS), tensors[BIAS])


def test_fp32_without_an_optimizer_is_what_bf16_was(tmp_path):
    tensors = {key: values for key, values in drawn_state().items() if not key.startswith("optimizer.")}
    source = write_checkpoint(tmp_path / "a", tensors=tensors)
    reader = CheckpointReader(reshape(source, tmp_path / "b", Reshaping(dtype="fp32")).folder)
    assert all(torch.equal(reader.read(key), values.float()) for key, values in tensors.items())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        *(([f"--{name}", "2"], f"{name.upper()}=2: .* Fix: omit --{name}") for name in SIZES),
        (["--experts", "single", "--layers", "stacked"], "layers=stacked: .* one key per expert"),
    ],
)
def test_refused_flags(flags, text, tmp_path, capsys):
    write_checkpoint(tmp_path / "a")
    assert main(["ckpt", "reshape", str(tmp_path / "a"), str(tmp_path / "b"), *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(text, line), line
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def refusals(tmp_path: Path, **common: Any) -> str:
    with pytest.raises(ValueError) as caught:
        reshape(tmp_path / "a" / "iter_0000005", tmp_path / "b", Reshaping(**common))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    return str(caught.value)


def test_mixed_layers_cannot_be_stacked(tmp_path):
    keys = ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.router.weight")
    write_checkpoint(tmp_path / "a", tensors=dict.fromkeys(keys, torch.ones(4, 8)))
    assert "layers=stacked: requires layers with the same tensors" in refusals(tmp_path, layers="stacked")


def test_an_optimizer_in_a_form_of_its_layout(tmp_path):
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16).bucket_idx_0.exp_avg"
    write_checkpoint(tmp_path / "a", tensors=drawn_state() | {bucket: torch.ones(8)})
    assert f"{bucket} depends on the parallel layout of its run" in refusals(tmp_path)
    written = reshape(tmp_path / "a" / "iter_0000005", tmp_path / "b", Reshaping(weights_only=True))
    assert bucket not in CheckpointReader(written.folder).tensors


def test_a_damaged_source_leaves_nothing_behind(tmp_path):
    flip_a_value(write_checkpoint(tmp_path / "a"))
    assert "__0_0.distcp: cannot be used (the checksum of" in refusals(tmp_path)


def test_memory_is_that_of_the_largest_chunk(tmp_path):
    """64 MiB in chunks of 8, rewritten in pieces of 1: 10 are in use, beside what malloc keeps (Linux)."""
    experts, layers, mebibyte = 8, 4, 1 << 20
    key = {fc: f"decoder.layers.mlp.experts.experts.{fc}.weight" for fc in ("linear_fc1", "linear_fc2")}
    writer = TorchDistWriter(tmp_path / "a")
    for layer in range(layers):
        for fc, rows, columns in (("linear_fc1", 1024, 256), ("linear_fc2", 512, 512)):
            values = torch.full((1, experts, rows, columns), float(layer))
            assert values.nbytes == 8 * mebibyte
            writer.add_chunk(key[fc], values, shape=(layers, *values.shape[1:]), offsets=(layer, 0, 0, 0))
    del values
    writer.finish({})
    reshape(write_checkpoint(tmp_path / "warm"), tmp_path / "up", Reshaping())

    reshape_it = partial(reshape, tmp_path / "a", tmp_path / "b", Reshaping(), keep_bytes=mebibyte)
    assert peak_bytes(reshape_it) < 40 * mebibyte
    found, box = CheckpointReader(one_checkpoint(tmp_path / "b")), (1, 1, 512, 512)
    means = [found.read(key["linear_fc2"], (layer, 5, 0, 0), box).mean().item() for layer in range(layers)]
    assert means == [0, 1, 2, 3]
