"""Hugging Face folders that cannot be converted: one line that says why, and nothing on disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.hf.tiny_models import their_logits, tiny_folder, tiny_model, weights_of
from helpers.relative_error import assert_equal_to
from moe_exp.checkpoint.format import folders
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


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
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
    "extra": (
        lambda w: w.update({"model.layers.1.bias": torch.ones(2)}),
        r"tensors without a use: model\.layers\.1\.bias\. ",
    ),
    "extra layer": (
        lambda w: w.update({"model.layers.3.input_layernorm.weight": torch.ones(32)}),
        r"without a use: model\.layers\.3",
    ),
    "extra expert": (
        lambda w: w.update({EXPERT.replace("3", "4"): w[EXPERT].clone()}),
        r"without a use: .*experts\.4\.w1",
    ),
    "misnamed": (
        lambda w: w.update({EXPERT.replace("w1", "w_1"): w.pop(EXPERT)}),
        r"tensors missing: .*experts\.3\.w1\.weight; without a use: .*experts\.3\.w_1\.weight",
    ),
    "another shape": (
        lambda w: w.update({EXPERT: torch.ones(24, 31)}),
        r"of another shape: .*w1\.weight \[24, 31\] instead of \[24, 32\]",
    ),
    "transposed": (
        lambda w: w.update({EXPERT: w[EXPERT].T.contiguous()}),
        r"of another shape: .*\[32, 24\] instead of \[24, 32\]",
    ),
    "another type": (
        lambda w: w.update({EXPERT: w[EXPERT].to(torch.float8_e4m3fn)}),
        r"a type that is not supported: .*w1.weight F8_E4M3",
    ),
    "two types": (
        lambda w: w.update({EXPERT: w[EXPERT].bfloat16()}),
        r"tensors of several types \(BF16, F32\)\. Fix: give --dtype",
    ),
    "many": (lambda w: [w.pop(name) for name in list(w) if "experts.3" in name], r"and 4 more\. "),
}


@pytest.mark.parametrize(("change", "text"), TENSORS.values(), ids=TENSORS)
def test_tensors(change, text, folder):
    refused(rewrite(folder("mixtral"), change), text)


FIELDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another class": (
        "mixtral",
        {"architectures": ["GptOssForCausalLM"]},
        r"architectures=GptOssForCausalLM: is not supported",
    ),
    "no class": (
        "mixtral",
        {"architectures": None, "model_type": "x"},
        r"architectures=\(missing\): is not supported",
    ),
    "clip": ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv=8\.0: queries, keys and values are not clipped here"),
    "window": ("mixtral", {"sliding_window": 32}, r"sliding_window=32: attention over a window"),
    "used window": ("qwen3", {"use_sliding_window": True, "sliding_window": 16}, r"sliding_window=16: "),
    "layer types": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
        r"layer_types=sliding_attention: only full",
    ),
    "attention bias": ("llama", {"attention_bias": True}, r"attention_bias=True: biases in the attention"),
    "mlp bias": ("llama", {"mlp_bias": True}, r"mlp_bias=True: biases in the MLP"),
    "activation": ("qwen3_moe", {"hidden_act": "gelu"}, r"hidden_act=gelu: other activations than SwiGLU"),
    "rope type": (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        r"rope_type=longrope: Megatron has",
    ),
    "old rope type": (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None},
        r"rope_type=dynamic: ",
    ),
    "rope by layer": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        r"one rotary embedding for all layers",
    ),
    "rope field": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "beta": 2}},
        r"config\.json: beta=2: is unknown",
    ),
    "llama 3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 4.0,
            }
        },
        r"low_freq_factor=2\.0: Megatron's Llama 3 scaling has 1\.0",
    ),
    "yarn": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
        r"attention_factor=1\.5: Megatron's YaRN has no such setting",
    ),
    "partial": ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5: "),
    "quantized": (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "fp8"}},
        r"quantization_config=fp8: quantized weights",
    ),
    "own code": (
        "deepseek_v3",
        {"auto_map": {"AutoModel": "modeling.Model"}},
        r"auto_map=\{\.\.\.\}: the model comes with code",
    ),
    "unknown field": (
        "llama",
        {"logit_scale": 0.5},
        r"logit_scale=0\.5: is unknown for LlamaForCausalLM.*--ignore-field logit_scale",
    ),
    "epsilon of MLA": (
        "deepseek_v3",
        {"rms_norm_eps": 1e-5},
        r"rms_norm_eps=1e-05: transformers has 1e-06 inside latent attention",
    ),
    "groups": ("deepseek_v3", {"num_experts_per_tok": 2}, r"topk_group=2: groups of experts are compared by"),
    "part of heads": (
        "qwen3",
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
        r"partial_rotary_factor=0\.5: ",
    ),
    "scoring": (
        "deepseek_v3",
        {"scoring_func": "softmax"},
        r"scoring_func=softmax: DeepSeek-V3 scores by sigmoid",
    ),
    "not interleaved": ("deepseek_v3", {"rope_interleave": False}, r"rope_interleave=False: "),
    "no experts": (
        "qwen3_moe",
        {"mlp_only_layers": [0, 1, 2]},
        r"mlp_only_layers=all layers: leaves no MoE layer",
    ),
    "no such layer": ("qwen3_moe", {"mlp_only_layers": [7]}, r"mlp_only_layers=\[7\]: must name layers of 3"),
    "no size": (
        "qwen3_moe",
        {"moe_intermediate_size": None},
        r"moe_intermediate_size=\(missing\): the model cannot be built",
    ),
    "a word for a number": (
        "llama",
        {"hidden_size": "large"},
        r"config\.json: head_dim: cannot be read \(.*str.*\)\. Fix: correct",
    ),
    "negative": ("mixtral", {"num_local_experts": -4}, r"NUM_EXPERTS=-4: .* Fix: correct the config\.json"),
    "more experts than tensors": (
        "mixtral",
        {"num_local_experts": 6},
        r"missing: .*experts\.4\.w1.*shape: .*gate\.weight \[4, 32\]",
    ),
    "fewer experts than tensors": ("mixtral", {"num_local_experts": 2}, r"without a use: .*experts\.2\.w1"),
    "tied, but different": (
        "llama",
        {"tie_word_embeddings": True},
        r"tie_word_embeddings=true, but lm_head\.weight is not",
    ),
}


@pytest.mark.parametrize(("name", "fields", "text"), FIELDS.values(), ids=FIELDS)
def test_config(name, fields, text, folder):
    refused(with_config(folder(name), **fields), text)


def test_ignored_fields_are_ignored(folder, tmp_path):
    source = with_config(folder("llama"), logit_scale=0.5, auto_map={"AutoModel": "modeling.Model"})
    from_hf(source, tmp_path / "ours", ignore_fields=("logit_scale", "auto_map"))
    assert (tmp_path / "ours" / "iter_0000000" / "manifest.json").is_file()


def test_prediction_layers_are_dropped_on_request_alone(folder, tmp_path, hf_folders):
    names = {
        "model.layers.3.eh_proj.weight": torch.ones(32, 64),
        "model.layers.3.embed_tokens.weight": torch.ones(256, 32),
    }
    source = rewrite(folder("deepseek_v3"), lambda w: w.update(names))
    refused(source, r"layers\.3\.eh_proj\.weight is a layer for multi-token prediction.*--drop-mtp")
    from_hf(source, tmp_path / "ours", drop_mtp=True)
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert set(weights_of(tmp_path / "back")) == set(weights_of(hf_folders["deepseek_v3"]))
    # No more of them than config.json says that there are.
    (tmp_path / "again").mkdir()
    (tmp_path / "hf").rename(tmp_path / "again" / "hf")
    refused(
        with_config(tmp_path / "again" / "hf", num_nextn_predict_layers=0),
        r"without a use: model\.layers\.3",
        drop_mtp=True,
    )


def test_tensors_without_effect_are_left_out(folder, tmp_path):
    """Buffers of old versions, and an output layer that is the embedding."""
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    source = rewrite(
        folder("qwen3"),
        lambda w: w.update(extra, **{"lm_head.weight": w["model.embed_tokens.weight"].clone()}),
    )
    from_hf(source, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert set(weights_of(tmp_path / "back")) == set(weights_of(source)) - set(extra) - {"lm_head.weight"}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder with several files and an index."""
    return tiny_folder(tmp_path / "hf", "mixtral", max_shard_size="40KB")


def test_missing_file(sharded):
    path = sorted(sharded.glob("*.safetensors"))[1]
    path.unlink()
    refused(sharded, rf"{path.name}: is missing\. Fix: fetch the folder again")


def test_truncated_file(sharded):
    path = sorted(sharded.glob("*.safetensors"))[1]
    os.truncate(path, path.stat().st_size - 100)
    refused(sharded, rf"{path.name}: is damaged \(.*\)\. Fix: fetch the folder again")


def test_file_of_another_kind(sharded):
    sorted(sharded.glob("*.safetensors"))[0].write_bytes(b"<html>not found</html>" * 10)
    refused(sharded, r"model-00001-.*: is damaged")


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda m: m.update({NORM: m["lm_head.weight"]}),
            rf"says {NORM} is in .*00006\.safetensors, it is in model-",
        ),
        (lambda m: m.pop(NORM), rf"says {NORM} is in no file, it is in model-"),
        (lambda m: m.update({"lost.weight": m[NORM]}), r"says lost\.weight is in .*, it is in no file"),
        (lambda m: m.update({"lost.weight": "../other.safetensors"}), r"names a file outside the folder"),
        (lambda m: m.clear(), r"tensors missing: lm_head\.weight, .* and \d+ more"),
    ],
    ids=["elsewhere", "not there", "too many", "outside", "empty"],
)
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
    assert f"reading model.safetensors, as transformers does, and not {INDEX}" in caplog.text
    to_hf(sharded.parent / "ours", sharded.parent / "back")
    tokens = torch.arange(1, 30)[None]
    expected = their_logits(sharded, tokens)
    assert (their_logits(hf_folders["mixtral"], tokens) - expected).norm() > 0.1 * expected.norm()
    assert_equal_to(1e-6, {"": their_logits(sharded.parent / "back", tokens)}, {"": expected})


def as_variant(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")


def as_adapter(folder: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    (folder / "adapter_config.json").write_text("{}")


OTHER_WEIGHTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a variant": (as_variant, r"has neither .* but model\.fp16\.safetensors\. Fix: "),
    "Mistral's format": (
        lambda f: (f / "model.safetensors").rename(f / "consolidated.safetensors"),
        r"has neither .* but consolidated\.safetensors\. Fix: save the model with save_pretrained",
    ),
    "beside a pickle": (
        lambda f: (as_variant(f), (f / "training_args.bin").touch()), r"but model\.fp16\.safetensors\. Fix: "
    ),
    "an adapter": (as_adapter, r"SRC=.*: has adapter_config\.json, .* Fix: merge the adapter"),
    "an adapter in a model": (
        lambda f: (f / "adapter_config.json").write_text("{}"), r"Fix: merge the adapter"
    ),
    "another name": (
        lambda f: with_config(f, transformers_weights="new.safetensors"),
        r"config\.json: transformers_weights=new\.safetensors: .* not model\.safetensors",
    ),
    "the index by name": (lambda f: with_config(f, transformers_weights=INDEX), r"transformers_weights="),
}  # fmt: skip


@pytest.mark.parametrize(("change", "text"), OTHER_WEIGHTS.values(), ids=OTHER_WEIGHTS)
def test_weights_that_are_not_under_the_usual_names(change, text, folder):
    source = folder("mixtral")
    change(source)
    refused(source, text)


def test_pickles_are_not_read(folder):
    source = folder("llama")
    (source / "model.safetensors").unlink()
    torch.save({"model.norm.weight": torch.ones(32)}, source / "pytorch_model.bin")
    refused(
        source,
        r"has pickled weights alone, which can run code when they are read\. Fix: load it with transformers"
        r" and save it again",
    )


def test_no_weights_no_config_no_folder(folder):
    source = folder("llama")
    (source / "model.safetensors").unlink()
    refused(source, r"has neither model\.safetensors nor model\.safetensors\.index\.json")
    (source / "config.json").write_text("{")
    refused(source, r"config\.json: is no JSON")
    (source / "config.json").unlink()
    refused(source, r"config\.json: is missing")
    with pytest.raises(ValueError, match=r"SRC=.*nothing: is no folder"):
        from_hf(source / "nothing", source.parent / "ours")


def test_target_is_there(folder, checkpoints, tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine").write_text("mine")
    refused(folder("llama"), r"DST=.*ours: exists already\. Fix: give a new folder, or remove it")
    with pytest.raises(ValueError, match=r"DST=.*ours: exists already"):
        to_hf(checkpoints["llama"], tmp_path / "ours")
    assert (tmp_path / "ours" / "mine").read_text() == "mine"


def test_target_cannot_be_made(folder, checkpoints, tmp_path):
    (tmp_path / "file").write_text("")
    for convert, source in ((from_hf, folder("llama")), (to_hf, checkpoints["llama"])):
        with pytest.raises(ValueError, match=r"DST=.*: cannot be made \(Not a directory\)\. Fix: "):
            convert(source, tmp_path / "file" / "ours")
        with pytest.raises(ValueError, match=r"DST=/proc/ours: cannot be made \(.*\)\. Fix: "):
            convert(source, Path("/proc/ours"))


def test_disk_without_room(folder, checkpoints, tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(10**6, 10**6 - 10, 10)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
    refused(folder("llama"), r"DST=.*ours: needs [\d.]+ [kM]B, [\d.]+ \w+ are free\. Fix: free some")
    with pytest.raises(ValueError, match=r"are free\. Fix: free some"):
        to_hf(checkpoints["llama"], tmp_path / "back" / "in" / "a" / "folder")
    assert not list(tmp_path.glob("back*"))


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()],
    ids=["full", "interrupted"],
)
def test_disk_that_fills_up_meanwhile(error, folder, tmp_path, monkeypatch):
    """Whatever ends the work, what was begun goes away."""

    def fails(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("moe_exp.checkpoint.format.torch_dist_writer.TorchDistWriter.finish", fails)
    source = folder("llama")
    with pytest.raises(type(error)):
        from_hf(source, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_checkpoint_that_does_not_fit_its_settings(checkpoints, tmp_path):
    """A damaged or foreign checkpoint is no model; nothing is written."""
    from moe_exp.checkpoint.format.torch_dist import CheckpointReader
    from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter

    reader = CheckpointReader(checkpoints["mixtral"] / "iter_0000000")
    common = reader.common()
    cases: dict[str, tuple[Callable[[TorchDistWriter, str], None], dict[str, Any], str]] = {
        "missing": (lambda w, key: None, common, r"tensors missing: decoder\.final_layernorm\.weight\. "),
        "shape": (
            lambda w, key: w.add_tensor(key, torch.ones(31)),
            common,
            r"of another shape: decoder\.final_layernorm\.weight \[31\]",
        ),
        "extra": (
            lambda w, key: (w.add_tensor(key, torch.ones(32)), w.add_tensor("decoder.new", torch.ones(2))),
            common,
            r"without a use: decoder\.new",
        ),
        "foreign": (
            lambda w, key: w.add_tensor(key, torch.ones(32)),
            {},
            r"does not say what model it is, moe_exp did not write it",
        ),
    }
    for name, (change, saved, text) in cases.items():
        writer = TorchDistWriter(tmp_path / name)
        for key in reader.tensors:
            if key == "decoder.final_layernorm.weight":
                change(writer, key)
            else:
                writer.add_tensor(key, reader.read(key))
        writer.finish(saved)
        with pytest.raises(ValueError, match=text):
            to_hf(tmp_path / name, tmp_path / "back")
        assert not list(tmp_path.glob("back*"))
    with pytest.raises(
        ValueError, match=r"has no fp32 weights of an optimizer\. Fix: leave --weights main out"
    ):
        to_hf(checkpoints["mixtral"], tmp_path / "back", main_weights=True)
    with pytest.raises(ValueError, match=r"MAX_SHARD_SIZE=0: must be at least 1 byte\. Fix: "):
        to_hf(checkpoints["mixtral"], tmp_path / "back", max_shard_bytes=0)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_local_experts"])
def test_counts_that_no_tensor_can_hold_are_refused_before_names_are_made_for_them(folder, field):
    refused(
        with_config(folder("mixtral"), **{field: 10**12}),
        f"{field}=1000000000000: is more than its tensors can hold",
    )


UNTRAINABLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "YaRN turns whole heads": (
        "glm4_moe",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
        r"config\.json says ROTARY_FRACTION=0\.5: Megatron's YaRN turns all channels of a head\.",
    ),
    "top-1, normalized": (
        "qwen3_moe",
        {"num_experts_per_tok": 1, "norm_topk_prob": True},
        r"config\.json says ROUTER_PRE_SOFTMAX=false: .*TOPK=1",
    ),
    "a factor of 1": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 1.0, "rope_theta": 1e4}},
        r"config\.json says ROPE_SCALING=yarn: scales nothing with ROPE_SCALING_FACTOR=1\.",
    ),
    "YaRN's factors of latent attention": (
        "deepseek_v3",
        {
            "rope_parameters": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_theta": 1e4,
            }
        },
        r"config\.json says ROPE_SCALING=llama3: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_a_model_that_no_run_could_train(name, folder):
    family, fields, text = UNTRAINABLE[name]
    refused(with_config(folder(family), **fields), text)
