"""`moe-exp score`: the file it writes, the training's validation loss from it, and what it refuses."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.checkpoint.ckpt_files import entries_of, flip_bit
from helpers.checkpoint.small_job import run_to_end, small_settings, write_tokens
from helpers.hf.hf_checkpoint import SEQ_LEN, VOCAB, tiny_model, write_checkpoint
from helpers.relative_error import relative_error
from moe_exp import cli
from moe_exp.checkpoint.format.folders import Manifest
from moe_exp.checkpoint.format.settings import _LAYOUT
from moe_exp.config import Config
from moe_exp.config.traits import traits
from moe_exp.data.samples.dataset import SampleStream, split_batch
from moe_exp.data.tokens.tokens import parse_blend
from moe_exp.inference.ranks import (
    _DROPLESS,
    _NO_TRAINING,
    _OUR_PARTS,
    Layout,
    check_files,
    config_for_use,
)
from moe_exp.runs.records import read_metrics
from moe_exp.runs.run_folder import RunFolder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tiny_model("mixtral"), tmp_path_factory.mktemp("mixtral") / "iter_0000000")


def run_score(checkpoint: Path, tokens: Path, out: Path, *flags: str) -> int:
    places = ["--checkpoint", str(checkpoint), "--tokens", str(tokens), "--out", str(out)]
    return cli.main(["score", *places, "--threads-per-rank", "1", *flags])


def saved_ids(path: Path, *, dtype=np.int64, below: int = VOCAB) -> Path:
    np.save(path, np.random.default_rng(5).integers(0, below, (5, 12)).astype(dtype))
    return path


def load(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.load(path))


@torch.no_grad()
def theirs(ids: torch.Tensor) -> torch.Tensor:
    """The logits of transformers."""
    return tiny_model("mixtral")(ids.long()).logits


def cross_entropy(logits: torch.Tensor, samples: torch.Tensor) -> float:
    batch = split_batch(samples)
    labels, mask = batch["labels"].flatten(), batch["loss_mask"].flatten()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
    return (losses * mask).double().sum().item() / mask.sum().item()


def test_the_logits_give_the_validation_loss_of_the_training(tmp_path):
    """Dropless, and where training drops tokens. Rows of padding are in the softmax of the training alone."""
    prefix = write_tokens(tmp_path)
    changes = {"seq_len": 32, "train_iters": 4, "warmup_iters": 1, "decay_iters": 4, "lr": 0.01}
    changes |= {"init_std": 0.1, "first_k_dense": 1, "valid_data": str(prefix)}
    mtp = {"mtp_num_layers": 1, "mtp_loss_coeff": 0.5}  # validation and inference leave these layers out
    for name, kind in (("dmoe", {}), ("moe", {"moe_type": "moe", "capacity_factor": 0.5}), ("mtp", mtp)):
        settings = small_settings(tmp_path, name, eval_interval=4, eval_iters=2, **changes, **kind)
        assert run_to_end(settings)[0] == 0
    samples = SampleStream(parse_blend(str(prefix)), seq_len=32, seed=1234, shuffle=False).batch(0, 8)
    np.save(tmp_path / "ids.npy", samples[:, :-1].numpy())
    ids, out = tmp_path / "ids.npy", tmp_path / "logits.npy"
    errors = []
    for name, flags in (("dmoe", []), ("mtp", []), ("moe", ["--capacity"]), ("moe", [])):
        folder = RunFolder(tmp_path / name)
        assert run_score(folder.path, ids, out, "--overwrite", *flags) == 0
        (record,) = (record for record in read_metrics(folder.metrics) if record["kind"] == "valid")
        errors.append(abs(cross_entropy(load(out), samples) / record["lm_loss"] - 1))
    assert max(errors[:3]) < 1e-6
    assert errors[3] > 1e-5  # the tokens that training drops count here


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_the_file(checkpoint, tmp_path, dtype, capsys):
    tokens, out = saved_ids(tmp_path / "ids.npy", dtype=dtype, below=200), tmp_path / "logits.npy"
    assert run_score(checkpoint, tokens, out, "--batch-size", "2") == 0
    assert load(out).dtype == torch.float32
    assert relative_error(load(out), theirs(load(tokens))) < 1e-5
    before = out.read_bytes()
    assert run_score(checkpoint, tokens, out) == 1
    assert "already exists. Fix: use another name, or pass --overwrite." in capsys.readouterr().err
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "logits.npy"]


def test_another_type(checkpoint, tmp_path):
    """bf16 weights of an fp32 checkpoint: near the logits in fp32, and not equal to them."""
    tokens = saved_ids(tmp_path / "ids.npy")
    for dtype in ("fp32", "bf16"):
        assert run_score(checkpoint, tokens, tmp_path / f"{dtype}.npy", "--dtype", dtype) == 0
    assert 1e-4 < relative_error(load(tmp_path / "bf16.npy"), load(tmp_path / "fp32.npy")) < 0.1


@pytest.mark.parametrize(
    ("array", "line"),
    [
        (
            np.zeros(3, np.int64),
            r"must be a non-empty matrix, not shape \[3\]\. Fix: use a \.npy file with integers \[B, S\]",
        ),
        (np.zeros((2, 0), np.int64), r"must be a non-empty matrix, not shape \[2, 0\]\. Fix: "),
        (np.zeros((2, 3)), r"must contain integers, not float64\. Fix: "),
        (
            np.array([[0, 1], [2, VOCAB]]),
            rf"has the id {VOCAB} in row 1, column 1, but the model's ids are 0 to ",
        ),
        (np.array([[0, -1]]), r"has the id -1 in row 0, column 1, "),
        (np.array([[{}]], dtype=object), r"cannot be read \(.*Python objects.*\)\. Fix: "),
        (None, r"does not exist\. Fix: "),
        (b"no array", r"cannot be read \(.*\)\. Fix: "),
    ],
    ids=lambda value: "",
)
def test_ids_that_cannot_be(checkpoint, tmp_path, capsys, array, line):
    path = tmp_path / "ids.npy"
    if isinstance(array, bytes):
        path.write_bytes(array)
    elif array is not None:
        np.save(path, array, allow_pickle=True)
    assert run_score(checkpoint, path, tmp_path / "logits.npy") == 1
    (printed,) = capsys.readouterr().err.splitlines()
    assert re.search(f"TOKENS={path}: {line}", printed), printed
    assert not (tmp_path / "logits.npy").exists()


@pytest.mark.parametrize(
    ("changes", "flags", "text"),
    [
        ({"checkpoint": ""}, [], "is not a distributed checkpoint"),
        ({"out": "ids.npy"}, [], "is the same file as --tokens"),
        ({"out": ""}, [], "is a folder"),
        ({"out": "none/x.npy"}, [], "its folder does not exist"),
        ({}, ["--batch-size", "0"], "BATCH_SIZE=0: must be positive"),
        ({}, ["--tp", "3"], "TP=3: must divide NUM_HEADS=4. Fix: set TP to one of 1, 2, 4."),
        ({}, ["--pp", "2", "--gpus-per-node", "3"], "GPUS_PER_NODE=3: 3 ranks"),
    ],
)
def test_other_bad_input(changes, flags, text, checkpoint, tmp_path, capsys):
    tokens = saved_ids(tmp_path / "ids.npy")
    places = {"checkpoint": checkpoint, "tokens": tokens, "out": tmp_path / "logits.npy"}
    places |= {name: tmp_path / place for name, place in changes.items()}
    assert run_score(*places.values(), *flags) == 1
    assert text in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy"]


def test_a_second_call_leaves_the_file_of_the_first_alone(checkpoint, tmp_path, capsys):
    tokens, partial = saved_ids(tmp_path / "ids.npy"), tmp_path / ".logits.npy.partial"
    partial.write_bytes(b"rows")
    assert run_score(checkpoint, tokens, tmp_path / "logits.npy") == 1
    assert "another job is writing this file, or was killed and left " in capsys.readouterr().err
    assert partial.read_bytes() == b"rows"


def test_rows_longer_than_those_of_the_training(checkpoint, tmp_path, caplog):
    np.save(tmp_path / "ids.npy", np.ones((1, SEQ_LEN + 3), np.int64))
    with caplog.at_level("WARNING", "moe_exp"):
        assert run_score(checkpoint, tmp_path / "ids.npy", tmp_path / "logits.npy") == 0
    assert f"rows have {SEQ_LEN + 3} tokens, but the model was trained with SEQ_LEN={SEQ_LEN}" in caplog.text


def test_damaged_and_foreign_checkpoints(checkpoint, tmp_path, capsys):
    """A tensor that is missing, and a file that has changed since its checksum was taken."""
    folder = write_checkpoint(tiny_model("mixtral"), tmp_path / "qk" / "iter_0000000", qk_norm=True)
    tokens = saved_ids(tmp_path / "ids.npy")
    assert run_score(folder, tokens, tmp_path / "logits.npy") == 1
    assert "has no decoder.layers.self_attention.k_layernorm.weight" in capsys.readouterr().err
    assert config_for_use(folder, Layout()).qk_norm
    (file,) = folder.glob("*.distcp")
    Manifest(0, entries_of(folder), {}).write(folder)
    check_files(folder)
    flip_bit(file, file.stat().st_size // 2)
    assert run_score(folder, tokens, tmp_path / "logits.npy") == 1
    assert f"{file}: has changed since it was written" in capsys.readouterr().err
    assert not (tmp_path / "logits.npy").exists()


def test_documents_of_a_row_do_not_see_each_other(checkpoint, tmp_path, capsys):
    """Rows of three documents, as transformers scores each of them alone; --eod-id is that of 7."""
    tokens = saved_ids(tmp_path / "ids.npy")
    ids = load(tokens)
    ids[ids == 7] = 8
    ids[:, 4] = ids[:, 9] = 7
    np.save(tokens, ids.numpy())
    alone = torch.cat([theirs(ids[:, part]) for part in np.s_[:5, 5:10, 10:]], 1)
    flags = ["--document-mask", "--eod-id", "7"]
    assert run_score(checkpoint, tokens, tmp_path / "masked.npy", *flags) == 0
    assert relative_error(load(tmp_path / "masked.npy"), alone) < 1e-5
    assert run_score(checkpoint, tokens, tmp_path / "plain.npy") == 0
    assert relative_error(load(tmp_path / "plain.npy"), alone) > 1e-3
    assert run_score(checkpoint, tokens, tmp_path / "no.npy", *flags[:2], "9999") == 1
    assert "EOD_ID=9999: must be from 0 to" in capsys.readouterr().err


# Settings outside the model whose checks depend neither on the parallel layout nor on sizes.
INDEPENDENT = {
    "preset", "lr", "min_lr", "router_lr_mult", "expert_lr_mult", "lr_groups", "lr_decay_style",
    "train_iters", "warmup_iters", "decay_iters", "wsd_decay_iters", "wsd_decay_style", "wsd_decay_ends",
    "lr_power_a", "lr_power_b", "sgd_momentum", "muon_momentum", "qk_clip", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_eps", "clip_grad", "ema_decay", "average_every", "seed", "text_documents",
    "prepend_bos", "text_field", "data_order", "document_tokens", "eod_mask_loss", "document_packing",
    "allow_other_data", "tokenizer", "data_dir", "run_dir", "run_name", "remote_dir",
    "allow_other_model", "allow_other_optimizer", "save_interval", "save_at_end", "async_save",
    "keep_last", "keep_every", "verify_checkpoint", "exit_interval", "log_interval", "log_timers",
    "eval_iters", "tensorboard_axes", "prometheus_file", "wandb_mode", "fingerprints", "check_interval",
    "disk_check", "max_bad_steps", "spike_action", "max_rollbacks", "preflight", "preflight_timeout",
    "preflight_slow", "hang_timeout", "hang_timeout_other", "slow_rank_every", "exclude_slow",
    "sdc_check_every", "trace_calls_from", "trace_calls_mb", "trace_calls_in",
    "max_restarts", "exit_duration", "profile_iters", "memory_snapshot",
}  # fmt: skip


def test_config_for_use_decides_every_setting():
    """Fails for a new setting: add it to `ranks._NO_TRAINING` if its check depends on layout or sizes."""
    replaced = {*_LAYOUT, *_NO_TRAINING, *_OUR_PARTS, *_DROPLESS, *Layout().settings(use_moe=True)}
    replaced |= {"gbsz", "seq_len", "dtype", "document_mask"}
    others = {name for name in Config.model_fields if traits(Config, name).part not in ("model", "experts")}
    assert others - replaced == INDEPENDENT
