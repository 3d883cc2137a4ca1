"""Logical tensors: the same names and values whatever the style of a checkpoint."""

import itertools

import pytest
import torch

from helpers.checkpoint.ckpt_files import EXPERTS, LAYERS, drawn_state, write_checkpoint
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


GROUPS = {
    "embedding.word_embeddings": "embedding", "output_layer": "output", "decoder.final_layernorm": "norms",
    "decoder.layers.0.self_attention.q_layernorm": "norms", "decoder.layers.0.mlp.router": "router",
    "decoder.layers.0.self_attention.linear_qkv": "attention", "decoder.layers.0.mlp.linear_fc1": "mlp",
    "decoder.layers.0.mlp.experts.3.linear_fc1": "experts", "something": "other",
    "decoder.layers.0.mlp.shared_experts.linear_fc1": "shared experts",
    "decoder.layers.0.mlp.fc2_latent_proj": "latent projections",
}  # fmt: skip


def test_groups():
    assert {name: group_of(f"{name}.weight") for name in GROUPS} == GROUPS
    assert group_of("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight") == "norms"


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
        assert weights[name].shape == tensors[key].shape[2:]
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
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    chunk_bytes = drawn_state()[key][0].nbytes
    reader = CheckpointReader(write_checkpoint(tmp_path), keep_bytes=chunk_bytes)
    stored = reader.tensors[key]
    first = reader.read_chunk(stored, stored.chunks[0])
    assert reader.read_chunk(stored, stored.chunks[0]) is first
    reader.read_chunk(stored, stored.chunks[1])
    assert sum(value.nbytes for value in reader._kept.values()) == chunk_bytes
    assert reader.read_chunk(stored, stored.chunks[0]) is not first
