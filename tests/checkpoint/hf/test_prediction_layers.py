"""Layers for multi-token prediction (MTP_NUM_LAYERS) of Hugging Face folders, which transformers reads with
MtpModel and never writes.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from helpers.hf.logits_on_ranks import our_losses
from helpers.hf.tiny_models import LAYERS, tiny_model, tiny_values, weights_of
from helpers.model_on_ranks import RandomTokens
from helpers.relative_error import relative_error
from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.hf.exporting import choose_architecture, to_hf
from moe_exp.checkpoint.hf.fields import UnsupportedModel
from moe_exp.checkpoint.hf.importing import from_hf
from moe_exp.checkpoint.tools.reshape import Reshaping, reshape
from moe_exp.config.loading import load_config
from moe_exp.inference.model import compare

TOKENS = RandomTokens(40, 250).batch(0, 2)
CASES = [("deepseek_v3", 1, {}), ("glm4_moe", 2, {}), ("glm4_moe_lite", 1, {"tie_word_embeddings": True})]
OTHERS = [("deepseek_v3", 2, {}), ("glm4_moe", 1, {"vocab_size": 250}), ("glm4_moe_lite", 2, {})]


def predicting_folder(folder: Path, name: str, num_layers: int, **changes: object) -> Path:
    """A folder as it is published: the last layer's names for each further layer, with copies of the
    embedding and the output layer.
    """
    model = tiny_model(name, num_nextn_predict_layers=num_layers, **changes)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights, width = load_file(file), model.config.hidden_size
    last, head = f"model.layers.{LAYERS - 1}.", "lm_head.weight"
    embedding = weights["model.embed_tokens.weight"]
    shapes = {key.removeprefix(last): value.shape for key, value in weights.items() if key.startswith(last)}
    shapes |= {f"{norm}.weight": (width,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    shapes["eh_proj.weight"] = (width, 2 * width)
    for layer in range(LAYERS, LAYERS + num_layers):
        for seed, (key, shape) in enumerate(sorted(shapes.items()), 1000 * layer):
            weights[f"model.layers.{layer}.{key}"] = tiny_values(key, torch.empty(shape), seed)
        weights[f"model.layers.{layer}.embed_tokens.weight"] = embedding.clone()
        weights[f"model.layers.{layer}.shared_head.head.weight"] = weights.get(head, embedding).clone()
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


@torch.no_grad()
def their_losses(folder: Path) -> Tensor:
    """Losses [1+K] by DeepSeek-V3's formula (arXiv:2412.19437, equations 21 to 25) with the layers, the
    embedding and the output layer of transformers.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config, weights = model.config, weights_of(folder)
    depth, eps = config.num_nextn_predict_layers, config.rms_norm_eps
    # The same weights as a model of more layers: transformers reads them with its own rules.
    changes = {"num_hidden_layers": LAYERS + depth}
    if hasattr(config, "mlp_layer_types"):
        changes["mlp_layer_types"] = [*config.mlp_layer_types, *["sparse"] * depth]
    longer = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **changes)
    hidden, head = model.model.eval()(TOKENS[:, :-1]).last_hidden_state, model.lm_head
    losses = [cross_entropy(head(hidden).flatten(0, 1), TOKENS[:, 1:].flatten())]
    for k, layer in enumerate(longer.eval().model.layers[LAYERS:], start=1):
        size, of_layer = hidden.size(1) - 1, f"model.layers.{LAYERS + k - 1}."
        norms = [weights[f"{of_layer}{name}.weight"] for name in ("enorm", "hnorm", "shared_head.norm")]
        embedded = model.model.embed_tokens(TOKENS[:, k : k + size])
        joined = [rms_norm(embedded, norms[0], eps), rms_norm(hidden[:, :size], norms[1], eps)]
        hidden = torch.cat(joined, dim=-1) @ weights[f"{of_layer}eh_proj.weight"].t()
        positions = torch.arange(size)[None]
        mask = torch.full((1, 1, size, size), -torch.inf).triu(1)
        rotary = longer.model.rotary_emb(hidden, position_ids=positions)
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
        hidden = rms_norm(hidden, norms[2], eps)
        losses.append(cross_entropy(head(hidden).flatten(0, 1), TOKENS[:, k + 1 :].flatten()))
    return torch.stack(losses)


@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_losses_and_round_trip(cases, tmp_path):
    sources = [
        predicting_folder(tmp_path / name / "hf", name, number, **changes) for name, number, changes in cases
    ]
    for source, (name, number, _) in zip(sources, cases, strict=True):
        done = from_hf(source, tmp_path / name / "ours")
        assert done.config.mtp_num_layers == number and not any("MTP" in note for note in done.notes)
        settings = tmp_path / name / "ours/settings.env"
        assert f"\nMTP_NUM_LAYERS={number}\n" in settings.read_text()
        assert done.architecture == to_hf(tmp_path / name / "ours", tmp_path / name / "back").architecture
        before, after = weights_of(source), weights_of(tmp_path / name / "back")
        assert before.keys() == after.keys(), name
        assert all(torch.equal(before[key], after[key]) for key in before), name
        assert (
            json.loads((tmp_path / name / "back/config.json").read_text())["num_nextn_predict_layers"]
            == number
        )
    ours = our_losses([tmp_path / name / "ours" for name, _, _ in cases], TOKENS)
    for (name, number, changes), found, source in zip(cases, ours, sources, strict=True):
        assert len(found) == 1 + number
        if "vocab_size" not in changes:  # rows that pad the vocabulary are part of our softmax
            assert relative_error(found, their_losses(source)) < 1e-5, name


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_differs_is_refused(name, tmp_path):
    source = predicting_folder(tmp_path / "hf", "glm4_moe", 2)
    weights = weights_of(source)
    weights[f"model.layers.4.{name}.weight"][7, 3] += 1e-6
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"model\.layers\.4\.{name}\.weight differs from .*--drop-mtp"):
        from_hf(source, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    from_hf(source, tmp_path / "ours", drop_mtp=True)


@pytest.mark.slow
def test_layouts_reshape_and_verify(tmp_path):
    source, ours = predicting_folder(tmp_path / "hf", "deepseek_v3", 1), tmp_path / "ours"
    from_hf(source, ours)
    lines, agrees = compare(source, ours)
    assert agrees and lines[-1] == "the models agree"
    reshape(one_checkpoint(ours), tmp_path / "single", Reshaping(layers="single", experts="single"))
    folders = [ours, tmp_path / "single"]
    for found in our_losses(folders, TOKENS, num_ranks=2, tp=2, ep=2):
        assert relative_error(found, their_losses(source)) < 1e-5
    stacked = Reshaping(layers="single", experts="stacked")  # dense and MoE layers are never stacked
    reshape(one_checkpoint(tmp_path / "single"), tmp_path / "stacked", stacked)
    to_hf(tmp_path / "stacked", tmp_path / "back")
    before, after = weights_of(source), weights_of(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_weights_without_the_layers_are_imported_with_a_note(hf_folders, tmp_path):
    done = from_hf(hf_folders["deepseek_v3"], tmp_path / "ours")  # whose config.json has the number 1
    assert done.notes[0].startswith("MTP_NUM_LAYERS=0: ") and done.config.mtp_num_layers == 0
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert "num_nextn_predict_layers" not in json.loads((tmp_path / "back/config.json").read_text())


def test_other_classes_have_no_such_layers():
    config = load_config({"mtp_num_layers": 1, "gpus_per_node": 1}, {})
    with pytest.raises(UnsupportedModel, match=r"MixtralForCausalLM does not support MTP_NUM_LAYERS=1;"):
        choose_architecture(config)
