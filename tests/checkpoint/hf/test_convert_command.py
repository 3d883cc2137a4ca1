"""`moe-exp convert`, as it is typed."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import ROOT
from helpers.hf.tiny_models import save_tokenizer, tiny_folder, weights_of
from helpers.jsonl import BinIdxWriter
from moe_exp.cli import main
from moe_exp.config.loading import load_config
from moe_exp.inference.model import compare


def test_there_and_back(tmp_path, hf_folders, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without the data/ that a run in the checkout leaves, which has a tokenizer
    assert main(["convert", "from-hf", str(hf_folders["mixtral"]), str(tmp_path / "ours")]) == 0
    out = capsys.readouterr().out
    assert "MixtralForCausalLM, fp32" in out
    assert f"moe-exp train --config {tmp_path / 'ours' / 'settings.env'}\n" in out
    names = [str(tmp_path / "ours"), str(tmp_path / "back")]
    assert main(["convert", "to-hf", *names, "--max-shard-size", "50KB", "--dtype", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "MixtralForCausalLM" in out and "Note: no tokenizer was written" in out
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 1
    assert all(value.dtype == torch.bfloat16 for value in weights_of(tmp_path / "back").values())


def test_single_layers_and_experts_are_stacked_by_the_command_in_the_error(tmp_path, checkpoints, capsys):
    single = ["--weights-only", "--layers", "single", "--experts", "single"]
    assert main(["ckpt", "reshape", str(checkpoints["mixtral"]), str(tmp_path / "single"), *single]) == 0
    assert main(["convert", "to-hf", str(tmp_path / "single"), str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err
    advised = shlex.split(re.search(r"the checkpoint's keys first: .*(ckpt reshape .*)\.\n", error)[1])
    assert main(advised) == 0
    for source, name in ((Path(advised[3]), "hf"), (checkpoints["mixtral"], "expected")):
        assert main(["convert", "to-hf", str(source), str(tmp_path / name)]) == 0
    found, expected = weights_of(tmp_path / "hf"), weights_of(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_a_user_can_mend_is_one_line(tmp_path, hf_folders, capsys):
    assert main(["convert", "from-hf", str(tmp_path / "none"), str(tmp_path / "ours")]) == 1
    assert main(["convert", "to-hf", str(hf_folders["llama"]), str(tmp_path / "back")]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"moe-exp convert: SRC={tmp_path / 'none'}: is not a folder. Fix: ")
    assert second.startswith("moe-exp convert: checkpoint=") and "is not a distributed checkpoint" in second
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--tokenizer", "--like"])
def test_a_folder_without_what_is_sought_in_it_is_refused_first(flag, tmp_path, checkpoints, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenizer.model").write_bytes(b"x")
    names = [str(checkpoints["mixtral"]), str(tmp_path / "hf"), flag, str(tmp_path / "other")]
    assert main(["convert", "to-hf", *names]) == 1
    assert f"{flag[2:].upper()}={tmp_path}/other: has n" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_source_without_tokenizer_json_leaves_tokenizer_empty(tmp_path, hf_folders):
    shutil.copytree(hf_folders["mixtral"], tmp_path / "theirs")
    (tmp_path / "theirs/tokenizer.model").write_bytes(b"x")
    (tmp_path / "theirs/tokenizer.json").unlink(missing_ok=True)
    assert main(["convert", "from-hf", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert "TOKENIZER" not in (tmp_path / "ours/settings.env").read_text()
    assert (tmp_path / "ours/tokenizer/tokenizer.model").is_file()


SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (None, 0)]


@pytest.mark.parametrize("num_added", [*SLOW, 3])
def test_settings_of_the_printed_command_are_read(num_added, tmp_path):
    """As a shell runs it, but for the training: the dry run builds the settings and checks them."""
    source = tiny_folder(tmp_path / "hf", "qwen2_moe")
    if num_added is not None:
        save_tokenizer(source, 256, num_added)
    main(["convert", "from-hf", str(source), str(tmp_path / "ours")])
    with BinIdxWriter(tmp_path / "tokens", vocab_size=256) as writer:
        writer.add_document(range(1, 200))
    env = tmp_path / "ours" / "settings.env"
    flags = f"--dry-run --gpus-per-node 1 --eval-interval 0 --train-data {tmp_path / 'tokens'}"
    code = f"set -a; . {env}; set +a; exec {shlex.quote(sys.executable)} -m moe_exp train {flags}"
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": ROOT}
    done = subprocess.run(["bash", "-c", code], **options)
    assert done.returncode == 0, done.stderr
    resolved = {line.partition("#")[0].strip() for line in done.stdout.splitlines()}
    assert set(env.read_text().splitlines()[1:]) <= resolved


def test_training_from_settings_env_does_not_depend_on_the_machine(tmp_path, capsys, monkeypatch):
    """The balancing of the folder, AdamW and a small learning rate, with GPUs and without."""
    source = tiny_folder(tmp_path / "hf", "mixtral", changes={"router_aux_loss_coef": 0.02})
    assert main(["convert", "from-hf", str(source), str(tmp_path / "ours")]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "AUX_LOSS_TYPE" in line]
    assert "AdamW, LR=3e-05 " in note and "AUX_LOSS_TYPE=aux_loss" in note
    flags = {"config": str(tmp_path / "ours/settings.env"), "train_iters": 200}
    found = []
    for num_gpus in (0, 8):
        for module in ("loading", "presets", "sections.launch", "sections.data"):
            monkeypatch.setattr(f"moe_exp.config.{module}.count_gpus", lambda number=num_gpus: number)
        found += [load_config(flags | data, {}) for data in ({}, {"train_data": "tokens"})]
    for config in found:
        assert (config.optimizer, config.lr, config.min_lr) == ("adam", 3e-5, 3e-6)
        assert (config.lr_decay_style, config.warmup_iters, config.decay_end) == ("cosine", 20, 200)
        balancing = (config.aux_loss_type, config.balancing_losses, config.z_loss_coeff)
        assert balancing == ("aux_loss", {"aux_loss": 0.02}, 0.0)
        of_machine = {"gpus_per_node": 1, "num_workers": 0, "train_data": ""}
        assert config.model_copy(update=of_machine) == found[0].model_copy(update=of_machine)


def test_an_average_of_hugging_face_folders_is_left_to_mergekit(hf_folders, tmp_path, capsys):
    sources = [str(hf_folders["llama"]), str(hf_folders["qwen3"])]
    assert main(["ckpt", "average", *sources, str(tmp_path / "mean")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"SRC={sources[0]}: is a Hugging Face folder.* Fix: .*mergekit", line)
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_verify_names_the_first_layer_that_differs(name, tmp_path, hf_folders, capsys):
    source, target = tmp_path / "source", tmp_path / "ours"
    shutil.copytree(hf_folders[name], source)
    assert main(["convert", "from-hf", str(source), str(target), "--verify"]) == 0
    out = capsys.readouterr().out
    found = [float(value) for value in re.findall(r"^  .* (\S+e[+-]\d+)$", out, re.MULTILINE)]
    assert len(found) == 5 and max(found) < 1e-5 and out.endswith("the models agree\n")
    (file,) = source.glob("*.safetensors")
    weights = load_file(file)
    weights["model.layers.1.self_attn.o_proj.weight"] *= 1.5
    save_file(weights, file, metadata={"format": "pt"})
    lines, agrees = compare(source, target)
    assert not agrees and lines[-1] == "differs from layer 2 on (limit 1e-04)"
    assert float(lines[2].split()[-1]) < 1e-5 < 1e-3 < float(lines[3].split()[-1])
