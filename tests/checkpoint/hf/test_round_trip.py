"""Hugging Face -> checkpoint -> Hugging Face: the same tensors bit by bit, the same config.json."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.ckpt_files import add_tensor
from helpers.hf.tiny_models import MODELS, save_tokenizer, tiny_folder, weights_of
from moe_exp.checkpoint.format.folders import Manifest, damages, one_checkpoint
from moe_exp.checkpoint.format.settings import saved_config
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.checkpoint.hf.exporting import to_hf
from moe_exp.checkpoint.hf.importing import from_hf
from moe_exp.checkpoint.hf.tensor_rules import taken_apart
from moe_exp.config import Config

# What a checkpoint has no place for, and what vLLM's DeepSeek-V3 asks for and transformers does not write.
_NOT_KEPT = {
    "num_nextn_predict_layers", "num_mtp_layers", "transformers_version", "use_cache", "dtype",
    "ep_size", "moe_layer_freq", "scoring_func", "topk_method",
    "sliding_window_pattern", "no_rope_layer_interval",  # the layers are listed
}  # fmt: skip


def fields(folder: Path, name: str = "config") -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def assert_same_weights(found: Path, expected: Path) -> None:
    ours, theirs = weights_of(found), weights_of(expected)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


def understood(folder: Path) -> dict[str, Any]:
    """The config as transformers reads it."""
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained(folder).to_dict()
    if read.get("head_dim", 0) is None:  # which stands for this
        read["head_dim"] = read["hidden_size"] // read["num_attention_heads"]
    rope = read["rope_parameters"]
    for one in [rope] if "rope_type" in rope else rope.values():
        one.pop("type", None)
        if one["rope_type"] == "yarn":
            one |= {"beta_fast": 32, "beta_slow": 1} | one
    return {name: read[name] for name in read.keys() - _NOT_KEPT if not name.startswith("_")}


@pytest.mark.parametrize("name", MODELS)
def test_bit_equal(name, hf_folders, checkpoints, tmp_path):
    done = to_hf(checkpoints[name], tmp_path / "back")
    assert done.architecture == f"{MODELS[name][0]}ForCausalLM"
    assert_same_weights(tmp_path / "back", hf_folders[name])
    # More fields than those of the class are for other software.
    assert understood(tmp_path / "back").items() >= understood(hf_folders[name]).items()
    ours, theirs = (fields(one, "generation_config") for one in (tmp_path / "back", hf_folders[name]))
    assert ours == theirs


@pytest.mark.parametrize(("seq_len", "length"), [(32, 64), (512, 512)])
def test_the_length_is_the_longer_of_source_and_run(seq_len, length, checkpoints, tmp_path):
    source = CheckpointReader(one_checkpoint(checkpoints["llama"]))
    writer = TorchDistWriter(tmp_path / "run/iter_0000000")
    for key in source.tensors:
        add_tensor(writer, key, source.read(key))
    changes = {"seq_len": seq_len, "load_dir": str(checkpoints["llama"])}
    writer.finish({"config": source.common()["config"] | changes, "iteration": 1})
    to_hf(tmp_path / "run/iter_0000000", tmp_path / "back")
    assert fields(tmp_path / "back")["max_position_embeddings"] == length


def test_value_channels_that_are_not_zero_are_not_dropped(checkpoints):
    config = saved_config(one_checkpoint(checkpoints["mimo_v2_flash"]))
    rows, columns = config.num_query_groups * 8, config.num_heads * 8
    for join, ours, theirs in (
        ("outputs", torch.ones(32, config.num_heads * 12), [(32, columns)]),
        ("heads", torch.ones(8 * 12, 32), [(4 * 12, 32), (2 * 12, 32), (rows, 32)]),
    ):
        with pytest.raises(ValueError, match="VALUE_HEAD_DIM=8: channels beyond it have nonzero weights"):
            taken_apart(join, ours, theirs, config)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_keeps_the_type(dtype, name, tmp_path):
    source = tiny_folder(tmp_path / "hf", "deepseek_v3", dtype=dtype)
    assert from_hf(source, tmp_path / "ours").config.dtype == name
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_weights(tmp_path / "back", source)


def test_reads_and_writes_many_files(tmp_path):
    source = tiny_folder(tmp_path / "hf", "mixtral", max_shard_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    from_hf(source, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back", max_shard_bytes=30_000)
    assert_same_weights(tmp_path / "back", source)
    index = fields(tmp_path / "back", "model.safetensors.index")
    first, *others = files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [path.name for path in files]
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights_of(source).values())
    # A tensor that is larger than a file may be has one of its own, the first.
    assert all(path.stat().st_size < 30_000 + 4000 for path in others) and first.stat().st_size > 30_000


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "ernie4_5_moe", "flint", "exaone_moe"])
def test_reads_what_transformers_5_writes_in_its_own_format(name, tmp_path, hf_folders):
    """All experts in one tensor; written back as it is published, which is what serves models reads."""
    fused = tiny_folder(tmp_path / "hf", name, save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in weights_of(fused))
    from_hf(fused, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_weights(tmp_path / "back", hf_folders[name])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab_size", "num_added", "padded"), [(256, 3, 384), (250, 3, 256), (250, 0, 256)])
def test_more_tokens_than_rows_of_the_embedding(vocab_size, num_added, padded, tied, tmp_path):
    changes = {"vocab_size": vocab_size, "tie_word_embeddings": tied}
    source = tiny_folder(tmp_path / "hf", "llama", changes=changes)
    save_tokenizer(source, vocab_size, num_added)
    done = from_hf(source, tmp_path / "ours")
    size = vocab_size + num_added
    assert done.config.vocab_size == size
    assert f"VOCAB_SIZE={size}\n" in (tmp_path / "ours/settings.env").read_text()
    assert any("rows of zeros" in note for note in done.notes) == (size < padded)
    grown = [note for note in done.notes if note.startswith(f"VOCAB_SIZE={size}: the tokenizer has")]
    assert len(grown) == bool(num_added) and all("<added_0>, <added_1>, <added_2>" in note for note in grown)
    reader, theirs = CheckpointReader(one_checkpoint(tmp_path / "ours")), weights_of(source)
    to_hf(tmp_path / "ours", tmp_path / "back")
    back = weights_of(tmp_path / "back")
    keys = {"model.embed_tokens.weight": "embedding.word_embeddings.weight"}
    keys |= {} if tied else {"lm_head.weight": "output_layer.weight"}
    for name, key in keys.items():
        table = reader.read(key)
        assert table.shape == (padded, 32) and not table[size:].any()
        assert torch.equal(table[:vocab_size], theirs[name])
        torch.testing.assert_close(table[vocab_size:size], theirs[name].mean(0).expand(num_added, -1))
        assert torch.equal(back[name], table[:size])
    assert all(torch.equal(back[name], value) for name, value in theirs.items() if name not in keys)
    assert fields(tmp_path / "back")["vocab_size"] == size


def test_another_type_on_request(tmp_path, hf_folders, checkpoints):
    """Rounded once, but for the bias that chooses experts."""
    from_hf(hf_folders["deepseek_v3"], tmp_path / "ours", dtype="bf16")
    to_hf(tmp_path / "ours", tmp_path / "rounded_in")
    to_hf(checkpoints["deepseek_v3"], tmp_path / "rounded_out", dtype="bf16")
    assert_same_weights(tmp_path / "rounded_in", tmp_path / "rounded_out")
    original = weights_of(hf_folders["deepseek_v3"])
    for name, value in weights_of(tmp_path / "rounded_out").items():
        kept = name.endswith("e_score_correction_bias")
        assert torch.equal(value, original[name] if kept else original[name].bfloat16()), name
    assert fields(tmp_path / "rounded_out")["torch_dtype"] == "bfloat16"


def test_checkpoint_is_whole(checkpoints):
    folder = one_checkpoint(checkpoints["qwen3_moe"])
    manifest = Manifest.read(folder)
    assert manifest.iteration == 0 and list(damages(folder, manifest.files)) == []
    assert "progress" not in CheckpointReader(folder).common()


def test_tokenizer_comes_along(tmp_path, hf_folders):
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer

    source = Path(shutil.copytree(hf_folders["llama"], tmp_path / "hf"))
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(source / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    names = tokens | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    done = from_hf(source, tmp_path / "ours")
    assert done.config.tokenizer == str((tmp_path / "ours" / "tokenizer").resolve())
    assert f"TOKENIZER={done.config.tokenizer}\n" in (tmp_path / "ours" / "settings.env").read_text()

    # Without the folder that it came from, the ids of its tokens are those of the tokenizer.
    shutil.rmtree(tmp_path / "ours" / "huggingface")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    ids = {"bos_token_id": tokenizer.token_to_id("<s>"), "eos_token_id": tokenizer.token_to_id("</s>")}
    assert fields(tmp_path / "back").items() >= (ids | {"pad_token_id": None}).items()
    assert fields(tmp_path / "back", "generation_config") == ids

    # From a tokenizer.json alone transformers makes the same tokenizer.
    to_hf(tmp_path / "ours", tmp_path / "alone", tokenizer=source / "tokenizer.json")
    alone = AutoTokenizer.from_pretrained(tmp_path / "alone")
    assert alone.convert_tokens_to_ids(["b", "</s>"]) == [3, ids["eos_token_id"]]

    # One that says nothing of its tokens: the usual name of the end of a text is taken.
    (source / "tokenizer_config.json").unlink()
    to_hf(tmp_path / "ours", tmp_path / "unsaid", tokenizer=source / "tokenizer.json")
    assert AutoTokenizer.from_pretrained(tmp_path / "unsaid").eos_token == "</s>"
    assert fields(tmp_path / "unsaid")["eos_token_id"] == ids["eos_token_id"]


@pytest.mark.parametrize("name", MODELS)
def test_settings_can_be_trained(name, checkpoints):
    """They pass the checks of `moe-exp train`, which has a corpus then."""
    saved = CheckpointReader(one_checkpoint(checkpoints[name])).common()["config"]
    changes = {"gpus_per_node": 1, "train_data": "tokens", "eval_interval": 0}
    assert list(Config(**saved | changes).problems()) == []


def test_a_folder_of_kimi_k2(tmp_path, hf_folders):
    """Its config.json names another model type; its tokenizer has no tokenizer.json and stays where it is."""
    source = Path(shutil.copytree(hf_folders["deepseek_v3"], tmp_path / "hf"))
    (source / "config.json").write_text(json.dumps(fields(source) | {"model_type": "kimi_k2"}))
    (source / "tiktoken.model").write_text("IQ== 0")
    assert from_hf(source, tmp_path / "ours").architecture == "DeepseekV3ForCausalLM"
    assert not (tmp_path / "ours/tokenizer").exists()
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_weights(tmp_path / "back", source)
