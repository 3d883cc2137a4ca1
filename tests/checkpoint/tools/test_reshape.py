"""`moe-exp ckpt reshape`: every rank of the target finds its own chunks, bit for bit, within a bound of
memory.
"""

from __future__ import annotations

import os
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.ckpt_files import (
    BIAS,
    STACKED,
    WHOLE,
    common_state,
    drawn_state,
    flip_bit,
    write_checkpoint,
)
from helpers.ranks import free_port, run_on_ranks
from helpers.whole_runs import SMALL
from moe_exp.checkpoint.format.folders import latest_iteration
from moe_exp.checkpoint.format.naming import logical_tensors, states
from moe_exp.checkpoint.format.settings import saved_order
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.checkpoint.load import compare_model
from moe_exp.checkpoint.tools import reshape as reshape_module
from moe_exp.checkpoint.tools.layouts import Layout
from moe_exp.checkpoint.tools.reshape import Reshaping, reshape
from moe_exp.checkpoint.tools.soundness import Verification
from moe_exp.cli import main
from moe_exp.config import Config, ConfigError

# key, shape of the whole, offsets, sizes
Asked = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
MODEL = {
    **SMALL, "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 20,
    "num_heads": 4, "gbsz": 8, "num_query_groups": 2, "seq_len": 16, "vocab_size": 200, "num_experts": 4,
    "topk": 2, "mbsz": 1, "dtype": "fp32",
}  # fmt: skip


def asked_by_rank(settings: dict[str, Any], port: int) -> list[set[Asked]]:
    """On every rank: the chunks that its model asks a checkpoint for, in either style of experts."""
    from moe_exp.checkpoint.format.keys import model_state
    from moe_exp.checkpoint.state import sharding_metadata, unwrapped
    from moe_exp.config import load_config
    from moe_exp.engine import runtime
    from moe_exp.engine.model import build_model

    config = load_config(settings, {})
    os.environ["MASTER_PORT"] = str(port)
    rank = runtime.start(config)
    model = build_model(config, rank)
    found = []
    for singleton in (False, True):
        metadata = {**sharding_metadata(rank), "singleton_local_shards": singleton}
        shards = [shard for chunk in model for shard in _shards(model_state(unwrapped(chunk), metadata))]
        found.append(
            {
                (
                    s.key,
                    tuple(s.global_shape),
                    tuple(s.global_offset),
                    (1,) * s.prepend_axis_num + tuple(s.local_shape),
                )
                for s in shards
            }
        )
    return found


def _shards(value: Any) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(value, ShardedTensorFactory):
        return _shards(value.build())
    if isinstance(value, dict | list):
        return [
            shard
            for item in (value.values() if isinstance(value, dict) else value)
            for shard in _shards(item)
        ]
    return [value] if isinstance(value, ShardedTensor) else []


slow = pytest.mark.slow
DENSE_TOO = {"first_k_dense": 1, "shared_expert_size": 24, "qk_norm": True}
LAYOUTS = [
    pytest.param(Layout(tp=2, ep=2), DENSE_TOO, id="TP2_EP2"),
    pytest.param(Layout(tp=2, ep=2, etp=2), DENSE_TOO, id="TP2_EP2_ETP2", marks=slow),
    pytest.param(Layout(tp=2, ep=2, etp=2), {}, id="stacked_TP2_EP2_ETP2", marks=slow),
    pytest.param(Layout(pp=2, vpp=2), {}, id="PP2_VPP2", marks=slow),
    pytest.param(
        Layout(pp=2, ep=2),
        {"router_score": "sigmoid", "router_bias_update_rate": 0.01},
        id="PP2_EP2",
        marks=slow,
    ),
    pytest.param(
        Layout(tp=2),
        {"activation": "gelu", "normalization": "LayerNorm", "tie_embeddings": True},
        id="TP2",
        marks=slow,
    ),
]


@pytest.mark.parametrize(("layout", "model"), LAYOUTS)
def test_each_rank_finds_the_chunks_that_it_asks_for(layout, model, tmp_path):
    num_ranks = layout.pp * layout.ranks_per_stage
    settings = MODEL | vars(layout) | model | {"gpus_per_node": num_ranks}
    by_rank = run_on_ranks(num_ranks, asked_by_rank, settings, free_port(), join=False)
    whole = {key: torch.randn(shape) for asked in by_rank for key, shape, _, _ in asked[0]}
    whole |= {
        f"optimizer.state.exp_avg.{key}": torch.randn(values.shape)
        for key, values in whole.items()
        if "expert_bias" not in key
    }
    source = write_plainly(tmp_path / "source", whole)
    for index, experts in enumerate(("stacked", "single")):
        found = CheckpointReader(
            reshape(source, tmp_path / experts, Reshaping(layout, experts=experts)).folder
        )
        chunks = {
            (s.key, s.shape, c.offsets, c.sizes): int(c.file.split("_")[2])
            for s in found.tensors.values()
            for c in s.chunks
        }
        weights = {chunk: rank for chunk, rank in chunks.items() if not chunk[0].startswith("optimizer.")}
        assert set(weights) == set().union(*(asked[index] for asked in by_rank))
        for rank, asked in enumerate(by_rank):
            assert {chunk for chunk, file in weights.items() if file == rank} <= asked[index]
        assert set(weights.values()) == set(range(num_ranks))
        of_moment = {
            (key.removeprefix("optimizer.state.exp_avg."), *rest): rank
            for (key, *rest), rank in chunks.items()
            if "exp_avg" in key
        }
        assert of_moment == {chunk: rank for chunk, rank in weights.items() if "expert_bias" not in chunk[0]}
    _assert_same_tensors(source, tmp_path / "stacked", whole)
    _assert_same_tensors(source, tmp_path / "single", None)


def write_plainly(
    folder: Path, tensors: dict[str, torch.Tensor], common: dict[str, Any] | None = None
) -> Path:
    writer = TorchDistWriter(folder)
    for key, values in tensors.items():
        writer.add_tensor(key, values)
    writer.finish(common or {})
    return folder


def _assert_same_tensors(source: Path, target: Path, whole: dict[str, torch.Tensor] | None) -> None:
    a, b = (
        CheckpointReader(source),
        CheckpointReader(target / "iter_0000000" if not (target / ".metadata").exists() else target),
    )
    if whole is not None:
        assert set(b.tensors) == set(whole)
        assert all(torch.equal(b.read(key), values) for key, values in whole.items())
    assert states(a) == states(b)
    for state in (None, *states(a)):
        ours, theirs = logical_tensors(a, state), logical_tensors(b, state)
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[name].read(), theirs[name].read()) for name in ours)


def test_there_and_back_is_the_same_bytes(tmp_path):
    source = write_checkpoint(tmp_path / "a")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()}
    there = reshape(source, tmp_path / "b", Reshaping(Layout(tp=2, ep=2), experts="single"))
    assert latest_iteration(tmp_path / "b") == 5
    assert list(Verification(there.folder).findings()) == []
    back = reshape(there.folder, tmp_path / "c", Reshaping(Layout(), layers="stacked", experts="stacked"))
    assert (there.num_rank_files, back.num_rank_files) == (2, 1)
    a, c = CheckpointReader(source), CheckpointReader(back.folder)
    assert set(c.tensors) == set(a.tensors)
    assert all(
        torch.equal(c.read(key), a.read(key)) and c.tensors[key].dtype == a.tensors[key].dtype
        for key in a.tensors
    )
    # The random streams stayed behind where TP was another.
    assert set(a.objects) - set(c.objects) == {"rng_state/shard_0.0_1.1"}
    assert set(c.objects) <= set(a.objects)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()} == before


def test_what_common_says_afterwards(tmp_path):
    source = write_checkpoint(tmp_path / "a")
    same_tp = CheckpointReader(reshape(source, tmp_path / "b", Reshaping(Layout(ep=4))).folder)
    common = same_tp.common()
    assert common["config"] == common_state(5)["config"] | {"ep": 4}
    assert common["layout"] == common_state(5)["layout"]
    assert same_tp.read_object("rng_state/shard_0.0_1.1")[0]["cpu"].tolist() == [0, 1, 2, 3]
    assert {name: common[name] for name in ("progress", "scheduler", "optimizer")} == {
        name: common_state(5)[name] for name in ("progress", "scheduler", "optimizer")
    }
    other = CheckpointReader(
        reshape(source, tmp_path / "c", Reshaping(Layout(pp=2, vpp=1), experts="single")).folder
    ).common()
    assert other["content_metadata"]["singleton_local_shards"] is True
    # Equal to the layout of no run: the streams, which are not there, start from the seed.
    assert other["layout"] not in ({"tp": tp, "pp": pp, "device": "cpu"} for tp in (1, 2) for pp in (1, 2))


def test_bf16_needs_the_fp32_weights_that_the_optimizer_continues_from(tmp_path):
    tensors = {key: value for key, value in drawn_state().items() if ".state.param." not in key}
    source = write_checkpoint(tmp_path / "a", tensors=tensors)
    with pytest.raises(ValueError, match=r"^DTYPE=bf16: the fp32 weights .* would be lost\. Fix: "):
        reshape(source, tmp_path / "b", Reshaping(Layout(), dtype="bf16"))
    assert not (tmp_path / "b").exists()
    reshape(source, tmp_path / "b", Reshaping(Layout(), dtype="bf16", weights_only=True))


def test_weights_only(tmp_path):
    source = write_checkpoint(tmp_path / "a")
    reader = CheckpointReader(reshape(source, tmp_path / "b", Reshaping(Layout(), weights_only=True)).folder)
    assert set(reader.tensors) == {*STACKED, *WHOLE, BIAS}
    assert set(reader.common()) == {"config", "content_metadata", "sample_order"}
    again = reshape(reader.folder, tmp_path / "c", Reshaping(Layout(), weights_only=True)).folder
    assert saved_order(again) == saved_order(source) == {"seed": 1234}
    assert not any(key.startswith("rng_state") for key in reader.objects)
    assert reader.folder.name == "iter_0000005"


def test_a_start_from_weights_alone_has_their_model_and_any_optimizer(tmp_path):
    folder = reshape(
        write_checkpoint(tmp_path / "a"), tmp_path / "b", Reshaping(Layout(), weights_only=True)
    ).folder
    config = Config(**CheckpointReader(folder).common()["config"])
    compare_model(config.model_copy(update={"optimizer": "muon"}), folder)
    other = config.model_copy(update={"rotary_base": 2e4})
    name = re.escape(str(folder))
    with pytest.raises(
        ConfigError, match=rf"^ROTARY_BASE=20000.0: the checkpoint {name} has .*ALLOW_OTHER_MODEL"
    ):
        compare_model(other, folder)
    compare_model(other.model_copy(update={"allow_other_model": True}), folder)


def test_fp32_weights_are_the_main_weights(tmp_path):
    source, tensors = write_checkpoint(tmp_path / "a"), drawn_state()
    reader = CheckpointReader(reshape(source, tmp_path / "b", Reshaping(Layout(ep=2), dtype="fp32")).folder)
    assert reader.common()["config"]["dtype"] == "fp32"
    for key in (*STACKED, *WHOLE):
        assert torch.equal(reader.read(key), tensors[f"optimizer.state.param.{key}"])
    half = CheckpointReader(reshape(reader.folder, tmp_path / "c", Reshaping(Layout(), dtype="bf16")).folder)
    for key in (*STACKED, *WHOLE):
        assert torch.equal(half.read(key), tensors[key])
    assert torch.equal(half.read(BIAS), tensors[BIAS])


def test_fp32_without_an_optimizer_is_what_bf16_was(tmp_path):
    tensors = {key: values for key, values in drawn_state().items() if not key.startswith("optimizer.")}
    source = write_checkpoint(tmp_path / "a", tensors=tensors)
    reader = CheckpointReader(reshape(source, tmp_path / "b", Reshaping(Layout(), dtype="fp32")).folder)
    assert all(torch.equal(reader.read(key), values.float()) for key, values in tensors.items())


REFUSED = [
    (
        ["--tp", "5"],
        (
            r"TP=5: the 16 rows of embedding\.word_embeddings\.weight cannot be split evenly\. Fix: give"
            r" another --tp\."
        ),
    ),
    (["--ep", "3"], r"EP=3: does not divide the 4 experts\. Fix: "),
    (["--pp", "3"], r"PP=3: 3 stages are more than the 2 layers\. Fix: "),
    (["--tp", "0"], r"TP=0: must be 1 or more\. Fix: "),
    (
        ["--etp", "4"],
        (
            r"ETP=4: the 12 rows of \S+\.mlp\.experts\.0\.linear_fc1\.weight cannot be .*, its gate by"
            r" itself\. Fix: "
        ),
    ),
    (
        ["--experts", "single", "--layers", "stacked"],
        r"layers=stacked: Megatron has no such style with single experts\. Fix: ",
    ),
]


@pytest.mark.parametrize(("flags", "text"), REFUSED)
def test_a_layout_that_does_not_fit(flags, text, tmp_path, capsys):
    write_checkpoint(tmp_path / "a")
    assert main(["ckpt", "reshape", str(tmp_path / "a"), str(tmp_path / "b"), *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(text, line), line
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def refusals(tmp_path: Path, **common: Any) -> str:
    with pytest.raises(ValueError) as caught:
        reshape(tmp_path / "a" / "iter_0000005", tmp_path / "b", Reshaping(Layout(), **common))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    return str(caught.value)


def test_mixed_layers_cannot_be_stacked(tmp_path):
    dense = {
        "decoder.layers.0.mlp.linear_fc1.weight": torch.ones(4, 8),
        "decoder.layers.1.mlp.router.weight": torch.ones(4, 8),
    }
    write_checkpoint(tmp_path / "a", tensors=dense)
    assert refusals(tmp_path, layers="stacked").startswith(
        "layers=stacked: the layers differ, as dense and MoE layers do. Fix: "
    )


def test_an_optimizer_in_a_form_of_its_layout(tmp_path):
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16).bucket_idx_0.exp_avg"
    write_checkpoint(tmp_path / "a", tensors=drawn_state() | {bucket: torch.ones(8)})
    assert (
        f"{bucket} belongs to the layout that wrote it, and cannot be rewritten. Fix: give --weights-only."
        in refusals(tmp_path)
    )
    written = reshape(tmp_path / "a" / "iter_0000005", tmp_path / "b", Reshaping(Layout(), weights_only=True))
    assert bucket not in CheckpointReader(written.folder).tensors


def test_a_damaged_source_leaves_nothing_behind(tmp_path):
    folder = write_checkpoint(tmp_path / "a")
    chunk = CheckpointReader(folder).tensors["output_layer.weight"].chunks[0]
    values = drawn_state()["output_layer.weight"].view(torch.uint8).numpy().tobytes()
    content = (folder / chunk.file).read_bytes()
    flip_bit(folder / chunk.file, content.index(values, chunk.start) + 7)
    assert "__0_0.distcp: cannot be used (the checksum of" in refusals(tmp_path)


def test_a_target_that_exists_or_has_no_room(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "a")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(reshape_module.shutil, "disk_usage", lambda path: usage(20_000))
    assert re.search(
        r"DST=\S+b: \S+ has 20 kB free and the checkpoint needs \S+ [kM]B\. Fix: ", refusals(tmp_path)
    )
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match=r"DST=\S+b: exists already\. Fix: "):
        reshape(tmp_path / "a" / "iter_0000005", tmp_path / "b", Reshaping(Layout()))
    with pytest.raises(ValueError, match=r"DST=\S+c: \S+no is no folder\. Fix: "):
        reshape(tmp_path / "a" / "iter_0000005", tmp_path / "no" / "c", Reshaping(Layout()))


def _memory(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


def test_memory_is_that_of_the_largest_chunk(tmp_path):
    """64 MiB in chunks of 8, rewritten in pieces of 1 and 2: 10 are in use at a time, beside freed ones that
    malloc keeps (Linux).
    """
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
    reshape(write_checkpoint(tmp_path / "warm"), tmp_path / "up", Reshaping(Layout(ep=2)))

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = _memory("VmRSS")
    written = reshape(tmp_path / "a", tmp_path / "b", Reshaping(Layout(ep=2, etp=2)), keep_bytes=mebibyte)
    assert written.num_bytes > 64 * mebibyte
    assert _memory("VmHWM") - before < 40 * mebibyte
    found = CheckpointReader(written.folder)
    assert [
        float(found.read(key["linear_fc2"], (layer, 5, 0, 0), (1, 1, 512, 512)).mean())
        for layer in range(layers)
    ] == [0, 1, 2, 3]


@slow
def test_training_goes_on_from_it_on_other_ranks(runs):
    """Saved by one rank, rewritten for two, the experts half on each."""
    one = runs.succeed("one", TRAIN_ITERS=6, SAVE_INTERVAL=3)
    source, target = one.folder.checkpoints, runs.run_dir / "rewritten"
    assert main(["ckpt", "reshape", str(source), str(target), "--iteration", "3", "--ep", "2"]) == 0
    two = runs.succeed("two", TRAIN_ITERS=6, LOAD_DIR=target, GPUS_PER_NODE=2, EP=2)
    assert two.curve("iteration") == [4, 5, 6]
    assert two.curve("lm_loss") == pytest.approx(one.curve("lm_loss")[3:], rel=1e-6)
    assert two.curve("grad_norm") == pytest.approx(one.curve("grad_norm")[3:], rel=1e-5)
