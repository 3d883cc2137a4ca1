"""Logical tensors: the same names and values whatever the style of a checkpoint."""

import itertools

import pytest
import torch

from helpers.checkpoint.ckpt_files import (
    EXPERT_HIDDEN,
    EXPERTS,
    HIDDEN,
    LAYERS,
    drawn_state,
    write_checkpoint,
)
from moe_exp.checkpoint.format.naming import KEEP_BYTES, group_of, logical_name, logical_tensors, states
from moe_exp.checkpoint.format.torch_dist import CheckpointReader

FC1, SHARED = "linear_fc1.weight", "decoder.layers.3.mlp.shared_experts.linear_fc1.weight"
LAYER_3, EXPERT_5 = "decoder.layers.3.", "decoder.layers.3.mlp.experts.5."
PLAIN = ("output_layer.weight", "decoder.final_layernorm.weight", "decoder.layers.3.mlp.router.weight")


@pytest.mark.parametrize(
    ("key", "place", "name", "half"),
    [
        *((name, (), name, "") for name in PLAIN),
        ("decoder.layers.mlp.router.weight", (3,), f"{LAYER_3}mlp.router.weight", ""),
        (f"decoder.layers.mlp.experts.experts.{FC1}", (3, 5), f"{EXPERT_5}{FC1}", ""),
        (f"{LAYER_3}mlp.experts.experts.{FC1}", (5,), f"{EXPERT_5}{FC1}", ""),
        (f"{LAYER_3}mlp.experts.experts.5.{FC1}_w", (), f"{EXPERT_5}{FC1}", "w"),
        ("decoder.layers.mlp.experts.experts.5.linear_fc1.bias_v", (3,), f"{EXPERT_5}linear_fc1.bias", "v"),
        (f"{SHARED}_v", (), SHARED, "v"),
        (f"{LAYER_3}mlp.linear_fc1.layer_norm_weight", (), f"{LAYER_3}pre_mlp_layernorm.weight", ""),
        ("decoder.layers.mlp.linear_fc1.layer_norm_bias", (3,), f"{LAYER_3}pre_mlp_layernorm.bias", ""),
    ],
)
def test_one_name_for_every_style(key, place, name, half):
    assert logical_name(key, place) == (name, half)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("embedding.word_embeddings.weight", "embedding"),
        ("output_layer.weight", "output"),
        ("decoder.final_layernorm.weight", "norms"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "norms"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", "norms"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "attention"),
        ("decoder.layers.0.mlp.router.weight", "router"),
        ("decoder.layers.0.mlp.experts.3.linear_fc1.weight", "experts"),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "shared experts"),
        ("decoder.layers.0.mlp.fc2_latent_proj.weight", "latent projections"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "mlp"),
        ("something", "other"),
    ],
)
def test_groups(name, group):
    assert group_of(name) == group


def test_values_are_those_of_the_stored_tensors(tmp_path):
    tensors = drawn_state()
    reader = CheckpointReader(write_checkpoint(tmp_path), keep_bytes=KEEP_BYTES)
    weights, moments = logical_tensors(reader), logical_tensors(reader, "exp_avg")
    assert states(reader) == ["exp_avg", "exp_avg_sq", "param"]
    assert len(weights) == 3 + LAYERS * (6 + 2 * EXPERTS)
    biases = {f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in range(LAYERS)}
    assert set(weights) - set(moments) == biases
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    of_moment = tensors[f"optimizer.state.exp_avg.{key}"]
    for layer, expert in itertools.product(range(LAYERS), range(EXPERTS)):
        name = f"decoder.layers.{layer}.mlp.experts.{expert}.linear_fc1.weight"
        assert weights[name].shape == (2 * EXPERT_HIDDEN, HIDDEN)
        assert torch.equal(weights[name].read(), tensors[key][layer, expert])
        assert torch.equal(moments[name].read((3, 1), (7, 2)), of_moment[layer, expert, 3:10, 1:3])


def test_halves_are_joined_gate_first(tmp_path):
    gate, up = torch.randn(6, 4), torch.randn(6, 4)
    prefix = "decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight"
    reader = CheckpointReader(write_checkpoint(tmp_path, tensors={f"{prefix}_v": up, f"{prefix}_w": gate}))
    (tensor,) = logical_tensors(reader).values()
    assert tensor.name == "decoder.layers.0.mlp.experts.1.linear_fc1.weight"
    assert torch.equal(tensor.read(), torch.cat([gate, up]))
    assert torch.equal(tensor.read((4, 1), (5, 2)), torch.cat([gate, up])[4:9, 1:3])
    assert torch.equal(tensor.read((8, 0), (2, 4)), up[2:4])


def test_a_reader_keeps_chunks_up_to_its_limit(tmp_path):
    folder = write_checkpoint(tmp_path)
    chunk_bytes = EXPERTS * 2 * EXPERT_HIDDEN * HIDDEN * 2
    reader = CheckpointReader(folder, keep_bytes=chunk_bytes)
    stored = reader.tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    first = reader.read_chunk(stored, stored.chunks[0])
    assert reader.read_chunk(stored, stored.chunks[0]) is first
    reader.read_chunk(stored, stored.chunks[1])
    assert sum(value.nbytes for value in reader._kept.values()) == chunk_bytes
    assert reader.read_chunk(stored, stored.chunks[0]) is not first
