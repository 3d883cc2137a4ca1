"""Hugging Face folders that cannot be converted: one line that says why, and nothing on disk."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoint.ckpt_files import add_tensor
from helpers.hf.tiny_models import their_logits, tiny_folder, tiny_model, weights_of
from helpers.relative_error import assert_equal_to
from moe_exp.checkpoint.format import folders
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.checkpoint.hf import importing
from moe_exp.checkpoint.hf.exporting import to_hf
from moe_exp.checkpoint.hf.importing import from_hf

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(hf_folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of the folders."""
    return lambda name: Path(shutil.copytree(hf_folders[name], tmp_path / "hf"))


def refused(source: Path, text: str, **options: Any) -> None:
    """`from_hf` says `text` in one line, and leaves the disk as it was."""
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(ValueError, match=text) as caught:
        from_hf(source, source.parent / "ours", **options)
    assert sorted(source.parent.rglob("*")) == before
    assert "\n" not in str(caught.value)
    assert "Fix: " in str(caught.value)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Changes the tensors of a folder, in place."""
    weights = weights_of(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_config(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda w: w.pop(EXPERT), rf"tensors missing: {EXPERT}\. "),
    "extra": (lambda w: w.update({"model.layers.1.bias": torch.ones(2)}), r"unused: .*\.1\.bias\. "),
    "extra layer": (lambda w: w.update({"model.layers.3.mlp.bias": torch.ones(2)}), r"unused: .*layers\.3"),
    "misnamed": (
        lambda w: w.update({EXPERT.replace("w1", "w_1"): w.pop(EXPERT)}),
        r"tensors missing: .*experts\.3\.w1\.weight; unused: .*experts\.3\.w_1\.weight",
    ),
    "another shape": (lambda w: w.update({EXPERT: torch.ones(24, 31)}), r"w1\.weight \[24, 31\] instead of"),
    "another type": (lambda w: w.update({EXPERT: w[EXPERT].to(torch.float8_e4m3fn)}), r"ed type: .*F8"),
    "two types": (lambda w: w.update({EXPERT: w[EXPERT].bfloat16()}), r"several types \(BF16, F32\)\. Fix: "),
    "many": (lambda w: [w.pop(name) for name in list(w) if "experts.3" in name], r"and 4 more\. "),
}  # fmt: skip


@pytest.mark.parametrize(("change", "text"), TENSORS.values(), ids=TENSORS)
def test_tensors(change, text, folder):
    refused(rewrite(folder("mixtral"), change), text)


NEW_ROPE = {"rope_type": "default", "rope_theta": 1e4}
NEW_YARN = NEW_ROPE | {"rope_type": "yarn", "factor": 4.0}
NEW_LLAMA3 = NEW_ROPE | {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
ALL_WINDOWS = {"layer_types": ["sliding_attention"] * 3}
FIELDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another class": ("mixtral", {"architectures": ["Llama4ForCausalLM"]}, r"architectures=Llama4"),
    "no class": ("mixtral", {"architectures": None, "model_type": "x"}, r"architectures=\(missing\): "),
    "clip": ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv=8\.0: "),
    "window": ("mixtral", {"sliding_window": 0}, r"sliding_window=0: must be above 0"),
    "switched off": (
        "qwen3", {"use_sliding_window": False} | ALL_WINDOWS, "sliding_window=None: "
    ),
    "layer types": ("qwen3", {"layer_types": ["full_attention"] * 2 + ["x"]}, r"layer_types=.*'x'"),
    "some layers": ("qwen3", {"layer_types": ["full_attention"]}, "layer_types=.* for each of the 3 layers"),
    "attention bias": ("llama", {"attention_bias": True}, r"attention_bias=True: biases in the attention"),
    "mlp bias": ("llama", {"mlp_bias": True}, r"mlp_bias=True: biases in the MLP"),
    "both directions": ("llama", {"is_causal": False}, "is_causal=False: attention to later tokens"),
    "both directions, null": ("gpt_oss", {"is_causal": None}, "is_causal=None: attention to later tokens"),
    "head size": ("qwen2", {"head_dim": 10}, "head_dim=10: must be hidden_size / num_attention_heads"),
    "head size, Cohere": ("cohere2", {"head_dim": 12}, "head_dim=12: must be hidden_size / num_attention"),
    "head size, Granite": ("granitemoe_swa", {"head_dim": 4}, "head_dim=4: must be hidden_size / num_att"),
    "activation": ("qwen3_moe", {"hidden_act": "gelu"}, r"hidden_act=gelu: activations other than SwiGLU"),
    "rope type": ("llama", {"rope_parameters": NEW_ROPE | {"rope_type": "long"}}, r"rope_type=long: "),
    "old rope type": (
        "llama", {"rope_scaling": {"type": "dynamic"}, "rope_parameters": None}, r"rope_type=dynamic: "
    ),
    "rope by layer": ("llama", {"rope_parameters": {"full_attention": NEW_ROPE}}, r"same rotary embedding"),
    "rope field": ("llama", {"rope_parameters": NEW_ROPE | {"beta": 2}}, r"config\.json: beta=2: is unknown"),
    "llama 3": ("llama", {"rope_parameters": NEW_LLAMA3 | {"low_freq_factor": 2.0}}, r"low_freq_factor=2\."),
    "yarn": ("qwen3", {"rope_parameters": NEW_YARN | {"attention_factor": 1.5}}, r"attention_factor=1\.5: "),
    "partial": ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5: "),
    "quantized": ("llama", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config=fp8: "),
    "own code": ("deepseek_v3", {"auto_map": {"AutoModel": "modeling.Model"}}, r"auto_map=\{\.\.\.\}: "),
    "unknown field": ("llama", {"logit_scale": 0.5}, r"logit_scale=0\.5: .*--ignore-field logit_scale"),
    "factor": ("granite", {"logits_scaling": None}, "logits_scaling=null: must not be null"),
    "alias": ("ernie4_5_moe", {"num_experts_per_tok": 1}, "moe_k=2: contradicts num_experts_per_tok=1"),
    "part is null": (
        "glm4_moe", {"partial_rotary_factor": None, "rope_parameters": {"rope_theta": 1e4}},
        "partial_rotary_factor=null: must be a number",
    ),
    "no attention": ("granite", {"attention_multiplier": 0.0}, "attention_multiplier=0.0: must be above 0"),
    "float": ("llama", {"num_hidden_layers": 3.0}, "num_hidden_layers=3.0: must be a whole number"),
    "prediction": ("deepseek_v3", {"num_nextn_predict_layers": 10**20}, "is more than the folder's tensors"),
    "no widths": ("hunyuan_v1_moe", {"moe_topk": []}, r"moe_topk=\[\]: must be the same in all layers"),
    "few layers": ("hunyuan_v1_moe", {"moe_topk": [2, 2]}, "must be the same in all layers"),
    "fp8": ("llama", {"quantization_config": "fp8"}, "quantization_config=fp8: quantized"),
    "classes": ("llama", {"architectures": [1]}, r"architectures=\[1\]: must be a list of class names"),
    "widths": ("hunyuan_v1_moe", {"moe_intermediate_size": [24, 24, 16]}, "must be the same in all layers"),
    "other width": ("hunyuan_v1_moe", {"moe_intermediate_size": 12}, "moe_intermediate_size=12: must be 24"),
    "part of heads": (
        "qwen3", {"rope_parameters": NEW_ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: "
    ),
    "ignored scaling": ("cohere2_moe", {"rope_scaling": NEW_YARN}, "rope_scaling=.*: transformers ignores"),
    "score": ("cohere2_moe", {"expert_selection_fn": "tanh"}, "expert_selection_fn=tanh: must be softmax or"),
    "larger values": ("mimo_v2_flash", {"v_head_dim": 16}, "VALUE_HEAD_DIM=16: must be at most the head"),
    "only windows": ("mimo_v2_flash", ALL_WINDOWS, "layer_types=.*: must have both kinds of layers"),
    "only whole": ("mimo_v2_flash", {"layer_types": ["full_attention"] * 3}, "must have both kinds"),
    "parts by kind": (
        "mimo_v2_flash", {"rope_parameters": {
            "full_attention": NEW_ROPE, "sliding_attention": NEW_ROPE | {"partial_rotary_factor": 1.0}
        }}, r"partial_rotary_factor of sliding_attention=1\.0: must be that of full_attention",
    ),
    "scoring": ("deepseek_v3", {"scoring_func": "softmax"}, r"scoring_func=softmax: DeepSeek-V3"),
    "not interleaved": ("deepseek_v3", {"rope_interleave": False}, r"rope_interleave=False: "),
    "no experts": ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, r"mlp_only_layers=all layers: must leave"),
    "no such layer": ("qwen3_moe", {"mlp_only_layers": [7]}, r"mlp_only_layers=\[7\]: must name layers"),
    "no size": ("qwen3_moe", {"moe_intermediate_size": None}, r"moe_intermediate_size=\(missing\): "),
    "a word for a number": ("llama", {"hidden_size": "large"}, r"head_dim: cannot be read \(.*str.*\)"),
    "negative": ("mixtral", {"num_local_experts": -4}, r"NUM_EXPERTS=-4: .* Fix: correct the config\.json"),
    "more experts than tensors": (
        "mixtral", {"num_local_experts": 6}, r"missing: .*experts\.4\.w1.*shape: .*gate\.weight \[4, 32\]"
    ),
    "fewer experts than tensors": ("mixtral", {"num_local_experts": 2}, r"unused: .*experts\.2\.w1"),
    "layers that no tensor holds": ("mixtral", {"num_hidden_layers": 10**12}, "num_hidden_layers=10{12}: "),
    "experts that no tensor holds": ("mixtral", {"num_local_experts": 10**12}, "num_local_experts=10{12}: "),
    "tied, but different": ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings=true, but lm_head"),
    "window by layer": (
        "dots1", {"sliding_window": 32, "max_window_layers": None, "layer_types": None}, "max_window_layers="
    ),
    "by type": ("dots1", ALL_WINDOWS, "sliding_window=None: must be above 0"),
    "Mistral": ("mistral", ALL_WINDOWS, "layer_types=.*: must be full_attention"),
    "norms of Solar": ("solar_open", {"use_qk_norm": True}, "use_qk_norm=True: is unknown"),
    "part of heads, Solar": ("solar_open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: "),
    "norms of MiniMax": ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm=False: "),
    "norms per head": ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type=per_head: "),
    "no routing bias": ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False: "),
    "whole queries": ("axk1", {"q_lora_rank": None}, "q_lora_rank=null: must not be null"),
    "head size of MLA": ("glm4_moe_lite", {"head_dim": 8}, "head_dim=8: must be equal to qk_rope_head_dim"),
    "types": ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, r"mlp_layer_types=\['sparse'\]: "),
    "number": ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace=2: contradicts"),
    "normalized": ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True: transformers' DeepSeek"),
    "noaux_tc": ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method=noaux_tc: must be greedy or"),
    "layer kinds": ("hy_v3", {"mlp_layer_types": ["x", "sparse", "sparse"]}, r"mlp_layer_types=\['x', "),
    "every second layer": ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval=2: all layers"),
    "last layer": ("ernie4_5_moe", {"moe_layer_end_index": 1}, "moe_layer_end_index=1: all layers"),
    "biases everywhere": ("ernie4_5_moe", {"use_bias": True}, "use_bias=True: biases in all projections"),
    "least sum": ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min=0.5: "),
    "some biases": ("gpt_oss", {"attention_bias": False}, "attention_bias=False: all projections must"),
    "name that transformers ignores": (
        "gpt_oss", {"num_experts_per_tok": None, "experts_per_token": 2}, r"num_experts_per_tok=\(missing\): "
    ),
    "another limit": ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0: the activation"),
    "no window": ("gpt_oss", {"sliding_window": None}, "sliding_window=null: must not be null"),
    "MXFP4": ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config=mxfp4: "),
    "fp8, gpt-oss": ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=fp8"),
    "rope of all layers": ("mellum", {"rope_parameters": NEW_ROPE}, "only reads full_attention"),
    "old rope": ("mellum", {"rope_theta": 1e4}, "rope_theta=10000.0: is unknown for Mellum"),
    "old type": (
        "olmo3", {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        "factor=4.0: is unknown for rope_type=default",
    ),
    "two forms": ("olmo3", {"rope_theta": 1e4}, "rope_parameters=.*: transformers only reads"),
    "scaled windows": (
        "olmo3", {"rope_parameters": {"full_attention": NEW_ROPE, "sliding_attention": NEW_YARN}},
        "rope_type of sliding_attention=yarn: must be default",
    ),
    "truncate by kind": (
        "olmo3", {"rope_parameters": {"full_attention": NEW_YARN | {"truncate": False}}}, "truncate=False: "
    ),
    "bases": ("granitemoe_swa", {"layer_rope_theta": [0, 1e4, 2e4]}, "layer_rope_theta=.*: must be one base"),
    "too few bases": ("granitemoe_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta=.*: must have 3 v"),
    "too many bases": ("granitemoe_swa", {"layer_rope_theta": [1e4] * 4}, "must have 3 values, as many"),
    "too few layers": ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers, .*: cannot be read"),
    "epsilon of 0": ("cohere2_moe", {"rms_norm_eps": 0.0}, "NORM_EPSILON=0.0: .* greater than 0"),
    # what no run could train
    "YaRN turns whole heads": ("glm4_moe", {"rope_parameters": NEW_YARN}, r"in ROTARY_FRACTION=0\.5: "),
    "top-1, normalized": (
        "qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "ROUTER_PRE_SOFTMAX=false: .*TOPK=1"
    ),
    "a factor of 1": ("llama", {"rope_parameters": NEW_YARN | {"factor": 1.0}}, "ROPE_SCALING_FACTOR=1"),
    "YaRN's factors of latent attention": (
        "deepseek_v3", {"rope_parameters": NEW_LLAMA3}, r"config\.json results in ROPE_SCALING=llama3: "
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "text"), FIELDS.values(), ids=FIELDS)
def test_config(name, fields, text, folder):
    refused(with_config(folder(name), **fields), text)


def test_ignored_fields_are_ignored(folder, tmp_path):
    source = with_config(folder("llama"), logit_scale=0.5, auto_map={"AutoModel": "modeling.Model"})
    from_hf(source, tmp_path / "ours", ignore_fields=("logit_scale", "auto_map"))
    assert (tmp_path / "ours" / "iter_0000000" / "manifest.json").is_file()


def test_prediction_layers_are_whole_or_dropped(folder, tmp_path, hf_folders):
    shapes = {"eh_proj": (32, 64), "embed_tokens": (256, 32)}
    extra = {f"model.layers.3.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    source = rewrite(folder("deepseek_v3"), lambda w: w.update(extra))
    refused(source, r"layers\.3\.embed_tokens\.weight differs from model\.embed_tokens.*--drop-mtp")
    rewrite(source, lambda w: w.pop("model.layers.3.embed_tokens.weight"))  # may be missing
    refused(source, r"missing: model\.layers\.3\.enorm\.weight, ")
    from_hf(source, tmp_path / "ours", drop_mtp=True)
    assert "MTP_NUM_LAYERS" not in (tmp_path / "ours/settings.env").read_text()
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert set(weights_of(tmp_path / "back")) == set(weights_of(hf_folders["deepseek_v3"]))
    # No more of them than config.json says that there are.
    shutil.rmtree(tmp_path / "ours")
    with_config(source, num_nextn_predict_layers=0)
    refused(source, r"unused: model\.layers\.3", drop_mtp=True)


def test_tensors_without_effect_are_left_out(folder, tmp_path, hf_folders):
    """Buffers of old versions, and an output layer that is the embedding."""
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    tied = {"lm_head.weight": weights_of(hf_folders["qwen3"])["model.embed_tokens.weight"].clone()}
    source = rewrite(folder("qwen3"), lambda w: w.update(extra | tied))
    from_hf(source, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert set(weights_of(tmp_path / "back")) == set(weights_of(source)) - set(extra) - {"lm_head.weight"}


def test_layers_for_prediction_that_transformers_ignores_are_left_out(folder, tmp_path, hf_folders):
    source = rewrite(folder("mellum"), lambda w: w.update({"mtp.fc.weight": torch.ones(32, 64)}))
    from_hf(source, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert set(weights_of(tmp_path / "back")) == set(weights_of(hf_folders["mellum"]))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder with several files and an index."""
    return tiny_folder(tmp_path / "hf", "mixtral", max_shard_size="40KB")


def test_a_file_of_several(sharded):
    path = sorted(sharded.glob("*.safetensors"))[1]
    os.truncate(path, path.stat().st_size - 100)
    refused(sharded, rf"{path.name}: is damaged \(.*\)\. Fix: download")
    path.write_bytes(b"<html>not found</html>" * 10)
    refused(sharded, rf"{path.name}: is damaged")
    path.unlink()
    refused(sharded, rf"{path.name}: is missing\. Fix: download the folder again")


NORM = "model.layers.1.input_layernorm.weight"
IN_INDEX: dict[str, tuple[Callable[[dict[str, str]], Any], str]] = {
    "elsewhere": (
        lambda m: m.update({NORM: m["lm_head.weight"]}),
        rf"00006\.\S+ for {NORM}, but model-",
    ),
    "not there": (lambda m: m.pop(NORM), rf"lists no file for {NORM}, but model-"),
    "too many": (lambda m: m.update(lost=m[NORM]), r"lists .* for lost, but no file contains it"),
    "outside": (lambda m: m.update(lost="../other.safetensors"), r"names a file outside the folder"),
    "empty": (lambda m: m.clear(), r"tensors missing: lm_head\.weight, .* and \d+ more"),
}


@pytest.mark.parametrize(("change", "text"), IN_INDEX.values(), ids=IN_INDEX)
def test_index_that_disagrees(change, text, sharded):
    path = sharded / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    refused(sharded, text)


@pytest.mark.parametrize("left", ["shards", "one shard", "no shard", "no JSON"])
def test_a_whole_file_beside_an_index_is_read_as_transformers_does(left, sharded, hf_folders, caplog):
    """`save_pretrained` leaves the index of a model that had shards before."""
    other = tiny_model("mixtral")
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(1.25)
    other.save_pretrained(sharded.parent / "other")
    shutil.copy(sharded.parent / "other/model.safetensors", sharded)
    for path in sorted(sharded.glob("model-*"))[{"shards": 99, "one shard": 1}.get(left, 0) :]:
        path.unlink()
    if left == "no JSON":
        (sharded / INDEX).write_text("{")
    from_hf(sharded, sharded.parent / "ours")
    assert f"reading model.safetensors instead of {INDEX}" in caplog.text
    to_hf(sharded.parent / "ours", sharded.parent / "back")
    tokens = torch.arange(1, 30)[None]
    expected = their_logits(sharded, tokens)
    assert (their_logits(hf_folders["mixtral"], tokens) - expected).norm() > 0.1 * expected.norm()
    assert_equal_to(1e-6, {"": their_logits(sharded.parent / "back", tokens)}, {"": expected})


def as_variant(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    (folder / "training_args.bin").touch()


def as_adapter(folder: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    (folder / "adapter_config.json").write_text("{}")


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": torch.ones(32)}, folder / "pytorch_model.bin")


OTHER_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pickle": (as_pickle, r"has only pickled weights, .* Fix: convert it with transformers"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"has neither model\.safetensors nor model"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json: is not JSON"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json: is missing"),
    "no folder": (shutil.rmtree, r"SRC=.*hf: is not a folder"),
    "a variant": (as_variant, r"has neither .* but model\.fp16\.safetensors\. Fix: "),
    "an adapter": (as_adapter, r"SRC=.*: has adapter_config\.json, .* Fix: merge the adapter"),
    "an adapter in a model": (lambda f: (f / "adapter_config.json").write_text("{}"), r"merge the adapter"),
    "another name": (lambda f: with_config(f, transformers_weights="new"), r"transformers_weights=new: "),
    "the index by name": (lambda f: with_config(f, transformers_weights=INDEX), r"transformers_weights="),
}  # fmt: skip


@pytest.mark.parametrize(("change", "text"), OTHER_FILES.values(), ids=OTHER_FILES)
def test_other_files_than_those_of_a_model(change, text, folder):
    source = folder("mixtral")
    change(source)
    refused(source, text)


def test_target_is_there_or_cannot_be_made(folder, checkpoints, tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine").write_text("mine")
    for convert, source in ((from_hf, folder("llama")), (to_hf, checkpoints["llama"])):
        for target, text in (
            (tmp_path / "ours", r"already exists\. Fix: "),
            (tmp_path / "ours" / "mine" / "new", r"cannot be created \(Not a directory\)\. Fix: "),
            (Path("/proc/ours"), r"cannot be created \(.*\)\. Fix: "),
        ):
            with pytest.raises(ValueError, match=f"DST={target}: {text}"):
                convert(source, target)
    assert (tmp_path / "ours" / "mine").read_text() == "mine"


def test_disk_without_room(checkpoints, tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(10**6, 10**6 - 10, 10)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"requires [\d.]+ [kM]B, but only [\d.]+ \w+ are free\. Fix: free"):
        to_hf(checkpoints["llama"], tmp_path / "back" / "in" / "a" / "folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(), KeyboardInterrupt()], ids=["full", "interrupted"])
def test_disk_that_fills_up_meanwhile(error, folder, tmp_path, monkeypatch):
    """Whatever ends the work, what was begun goes away."""
    monkeypatch.setattr(TorchDistWriter, "finish", Mock(side_effect=error))
    source = folder("llama")
    with pytest.raises(type(error)):
        from_hf(source, tmp_path / "ours")
    assert list(tmp_path.iterdir()) == [source]


NORM_KEY = "decoder.final_layernorm.weight"


@pytest.mark.parametrize(
    ("changed", "common", "text"),
    [
        ({}, True, rf"tensors missing: {NORM_KEY}\. "),
        ({NORM_KEY: torch.ones(31)}, True, rf"with another shape: {NORM_KEY} \[31\]"),
        ({NORM_KEY: torch.ones(32), "decoder.new": torch.ones(2)}, True, r"unused: decoder\.new"),
        ({NORM_KEY: torch.ones(32)}, False, "was not written by moe_exp"),
    ],
    ids=["missing", "shape", "extra", "foreign"],
)
def test_checkpoint_that_does_not_fit_its_settings(changed, common, text, checkpoints, tmp_path):
    """A damaged or foreign checkpoint is no model; nothing is written."""
    reader = CheckpointReader(checkpoints["mixtral"] / "iter_0000000")
    writer = TorchDistWriter(tmp_path / "source")
    kept = {key: reader.read(key) for key in reader.tensors if key != NORM_KEY}
    for key, values in (kept | changed).items():
        add_tensor(writer, key, values)
    writer.finish(reader.common() if common else {})
    with pytest.raises(ValueError, match=text):
        to_hf(tmp_path / "source", tmp_path / "back")
    assert not list(tmp_path.glob("back*"))


def test_options_that_cannot_be(checkpoints, tmp_path):
    with pytest.raises(ValueError, match=r"has no fp32 main weights\. Fix: omit --weights main"):
        to_hf(checkpoints["mixtral"], tmp_path / "back", main_weights=True)
    with pytest.raises(ValueError, match=r"MAX_SHARD_SIZE=0: must be at least 1 byte\. Fix: "):
        to_hf(checkpoints["mixtral"], tmp_path / "back", max_shard_bytes=0)


def test_a_conversion_that_fails_closes_its_file(folder, monkeypatch):
    writers: list[TorchDistWriter] = []

    class FullDisk(TorchDistWriter):
        def add_chunk(self, *arguments: Any, **options: Any) -> None:
            if self.written.places:
                writers.append(self)
                raise ValueError("no space is left. Fix: free some.")
            super().add_chunk(*arguments, **options)

    monkeypatch.setattr(importing, "TorchDistWriter", FullDisk)
    refused(folder("mixtral"), "no space is left")
    (writer,) = writers
    assert writer._file is not None and writer._file._file.closed
