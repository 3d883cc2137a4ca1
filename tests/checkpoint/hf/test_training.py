"""A run that continues from a Hugging Face folder starts at its loss, and goes back to transformers."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from helpers.hf.logits_on_ranks import our_logits
from helpers.hf.tiny_models import REFERENCE, VOCAB, their_logits, tiny_folder, weights_of
from helpers.jsonl import BinIdxWriter
from helpers.model_on_ranks import run_models
from helpers.relative_error import assert_equal_to
from helpers.whole_runs import EndedRun, Runs
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.hf.exporting import to_hf
from moe_exp.checkpoint.hf.importing import from_hf
from moe_exp.data.samples.dataset import SampleStream

SEQ_LEN, GBSZ = 32, 8
TRAINING = {
    "EP": 2, "GPUS_PER_NODE": 2, "SEQ_LEN": SEQ_LEN, "MBSZ": 2, "GBSZ": GBSZ, "TRAIN_ITERS": 2,
    "WARMUP_ITERS": 0, "LR": 0.01,
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A folder of transformers, the run that started from it, and that run as a folder again."""

    source: Path
    run: EndedRun
    samples: torch.Tensor
    exported: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(0)
    with BinIdxWriter(root / "tokens", vocab_size=VOCAB) as writer:
        for _ in range(20):
            writer.add_document(rng.integers(1, VOCAB, 40))
    source = tiny_folder(root / "hf", "qwen2_moe", changes=REFERENCE)
    from_hf(source, root / "ours")
    # As a shell reads the file that the command names.
    lines = (root / "ours" / "settings.env").read_text().splitlines()
    settings = dict(shlex.split(line)[0].split("=", 1) for line in lines if not line.startswith("#"))
    data = {"TRAIN_DATA": root / "tokens", "VALID_DATA": root / "tokens"}
    run = Runs(root / "runs", root / "data").succeed("on", **settings | data | TRAINING)
    samples = SampleStream([(1.0, str(root / "tokens"))], seq_len=SEQ_LEN, seed=1234).batch(0, GBSZ)
    assert to_hf(run.folder.path, root / "back").architecture == "Qwen2MoeForCausalLM"
    return Trained(source, run, samples, root / "back")


def test_first_loss_is_that_of_transformers(trained):
    tokens, labels = trained.samples[:, :-1], trained.samples[:, 1:]
    expected = cross_entropy(their_logits(trained.source, tokens).flatten(0, 1), labels.flatten())
    first, second = trained.run.curve("lm_loss")
    assert first == pytest.approx(expected.item(), rel=1e-5)
    assert abs(second - first) > 1e-3


def test_goes_back_with_the_same_logits(trained):
    """Trained at EP 2, with optimizer; the layers are mixed, top-1 weights not normalized, no biases."""
    tokens = trained.samples[:2, :-1]
    (ours,) = our_logits([trained.run.folder.checkpoints], tokens)
    theirs = their_logits(trained.exported, tokens)
    assert_equal_to(1e-5, {"logits": ours}, {"logits": theirs})
    fields = json.loads((trained.exported / "config.json").read_text())
    source = json.loads((trained.source / "config.json").read_text())
    # of the folder that LOAD_DIR was converted from, not SEQ_LEN of the run
    assert fields["max_position_embeddings"] == source["max_position_embeddings"] == 2 * SEQ_LEN
    assert fields["router_aux_loss_coef"] == source["router_aux_loss_coef"]
    before = their_logits(trained.source, tokens)
    assert (theirs - before).norm() > 1e-3 * before.norm()


def test_is_readable_by_what_serves_models(trained):
    """Biases on queries, keys and values and a shared expert, which vLLM's Qwen2Moe always has, are zero."""
    from transformers import AutoModelForCausalLM

    fields = json.loads((trained.exported / "config.json").read_text())
    assert fields["qkv_bias"] is True
    assert (fields["shared_expert_intermediate_size"], fields["shared_expert_is_zero"]) == (64, True)
    assert (fields["norm_topk_prob"], fields["num_experts_per_tok"]) == (False, 1)
    assert fields["mlp_only_layers"] == [0]
    weights = weights_of(trained.exported)
    _, report = AutoModelForCausalLM.from_pretrained(trained.exported, output_loading_info=True)
    assert not any(report.values()), report
    without_effect = [name for name in weights if name.endswith(".bias") or "shared_expert" in name]
    assert len(without_effect) == 3 * 3 + 2 * 4
    assert not any(weights[name].any() for name in without_effect)


def test_fp32_weights_of_the_optimizer(trained, tmp_path):
    """In an fp32 run they are the weights themselves."""
    folder = trained.run.folder.checkpoints
    tensors = CheckpointReader(folder / "iter_0000002").tensors
    assert any(key.startswith("optimizer.state.param.") for key in tensors)
    to_hf(folder, tmp_path / "main", main_weights=True)
    main, model = weights_of(tmp_path / "main"), weights_of(trained.exported)
    assert set(main) == set(model)
    assert all(torch.equal(main[name], model[name]) for name in main)


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False])
def test_fp32_weights_of_a_bf16_run(distributed, tmp_path):
    """They are what the weights are rounded from, and are rounded once on the way out."""
    settings = {"dtype": "bf16", "num_experts": 4, "topk": 2, "vocab_size": 256}
    run_models(1, [settings | {"distributed_optimizer": distributed, "save": str(tmp_path / "run")}])
    to_hf(tmp_path / "run", tmp_path / "model")
    to_hf(tmp_path / "run", tmp_path / "main", main_weights=True)
    to_hf(tmp_path / "run", tmp_path / "rounded", main_weights=True, dtype="bf16")
    model, main, rounded = (weights_of(tmp_path / name) for name in ("model", "main", "rounded"))
    for name, value in model.items():
        assert (value.dtype, main[name].dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(rounded[name], main[name].bfloat16()) and torch.equal(value, rounded[name]), name
