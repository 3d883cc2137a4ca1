"""Scoring and generation against transformers, on one rank and on several; the cache changes nothing."""

import contextlib
import itertools
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from helpers.hf.hf_checkpoint import KINDS, SEQ_LEN, VOCAB, tiny_model, write_checkpoint
from helpers.ranks import run_on_ranks
from helpers.relative_error import relative_error
from moe_exp.checkpoint.format.settings import saved_config
from moe_exp.config import load_config
from moe_exp.engine import runtime
from moe_exp.inference.generate import Sampler, Sampling, new_tokens
from moe_exp.inference.ranks import Layout, Stage, config_for_use, load_model
from moe_exp.inference.score import ScoreRequest, plan_scoring, score
from moe_exp.layers.kernels.launch import KernelFailure

PROMPT = [17, 200, 3, 41, 99, 0, 56]
NEW_TOKENS = 24


def ids(rows: int = 3, length: int = 21) -> np.ndarray:
    return np.random.default_rng(5).integers(0, VOCAB, (rows, length))


@contextlib.contextmanager
def one_stage(folder: Path, **changes):
    """The model of a checkpoint in this process."""
    config = config_for_use(folder, Layout(), **changes)
    rank = runtime.start_alone(config.model_copy(update={"threads_per_rank": 1}))
    try:
        yield Stage(config, rank, load_model(config, rank, folder))
    finally:
        runtime.stop()


def test_kernels_that_fail_their_self_test_are_not_used(monkeypatch):
    """Nor in a model that is only used: with `auto` it runs as a training does."""
    failures, build = [KernelFailure("experts", ["combine is wrong"], "torch")], Mock(side_effect=LookupError)
    monkeypatch.setattr("moe_exp.inference.ranks.check_run", lambda config, rank: failures)
    monkeypatch.setattr("moe_exp.inference.ranks.build_chunk", build)
    with pytest.raises(LookupError):
        load_model(load_config({"preset": "cpu"}, {}), None, Path("none"))
    assert build.call_args.kwargs["kernel_failures"] == failures


GREEDY, DRAWN = Sampling(), Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=3)


def generated(stage: Stage, sampling: Sampling = GREEDY) -> list[int]:
    """Tokens that continue PROMPT."""
    found = new_tokens(stage, PROMPT, Sampler(sampling), max_positions=len(PROMPT) + NEW_TOKENS)
    return [token for token, _ in found]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A model of transformers, and the checkpoint with its weights."""
    model = tiny_model(request.param)
    return model, write_checkpoint(model, tmp_path_factory.mktemp(request.param) / "iter_0000000")


def theirs(model) -> list[int]:
    model.generation_config.eos_token_id = None  # no token ends these texts
    tokens = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(tokens, **options)[0, len(PROMPT) :].tolist()


def test_logits_and_greedy_tokens_are_those_of_transformers(pair):
    model, folder = pair
    tokens = torch.from_numpy(ids())
    with torch.no_grad():
        expected = model(tokens).logits
    with one_stage(folder) as stage:
        assert relative_error(stage.logits(tokens), expected) < 1e-5
        assert generated(stage) == theirs(model)


@pytest.mark.parametrize("kind", ["mixtral", "llama"])
def test_a_training_in_fp8_or_with_our_loss_is_used_without_them(kind, tmp_path):
    model = tiny_model(kind)
    trained = {"impl": "te", "fp8": "hybrid", "expert_backend": "te", "cross_entropy": "triton"}
    folder = write_checkpoint(model, tmp_path / "iter_0000000", dtype="bf16", **trained)
    with one_stage(folder, dtype="fp32") as stage:
        assert (stage.config.fp8, stage.config.cross_entropy) == ("none", "megatron")
        assert generated(stage) == theirs(model)


def test_settings_that_only_training_uses_are_no_obstacle(tmp_path):
    """They are checked against sizes that the ranks of inference do not have."""
    model = tiny_model("mixtral")
    trained = {
        "seq_len": "32", "mbsz": "2", "gbsz": "16", "gpus_per_node": "8", "ep": "2", "train_iters": "20",
        "train_data": "unused", "save_interval": "10", "eval_interval": "10", "keep_best": "2",
        "data_stages": "[{from_samples: 64, train_data: x, seq_len: 64}]", "token_rounding": "8",
        "dump_iters": "10", "dump_ranks": "0,4", "profile_iters": "10", "profile_ranks": "0,3",
    }  # fmt: skip
    folder = write_checkpoint(model, tmp_path / "iter_0000000", **trained)
    assert saved_config(folder).longest_sample == 64
    with one_stage(folder) as stage:
        assert generated(stage) == theirs(model)


def test_the_cache_changes_no_logit(pair):
    _, folder = pair
    tokens = torch.from_numpy(ids(1, SEQ_LEN))
    with one_stage(folder) as stage:
        whole = stage.logits(tokens)
        for first in (1, 7, SEQ_LEN - 1):
            with stage.cache(SEQ_LEN):
                parts = [stage.logits(tokens[:, :first])]
                # Two at once as well: what is new need not be a single token.
                bounds = [first, *range(first + 1, SEQ_LEN, 2), SEQ_LEN]
                parts += [stage.logits(tokens[:, a:b]) for a, b in itertools.pairwise(bounds) if b > a]
            cached = torch.cat(parts, dim=1)
            for position in range(SEQ_LEN):
                assert relative_error(cached[:, position], whole[:, position]) < 1e-6, (first, position)


def use_on_rank(folder: Path, layout: Layout, tokens: Path, out: Path):
    """Scores and generates, greedily and by drawing, on this rank of a job."""
    scoring = plan_scoring(ScoreRequest(str(folder), str(tokens), str(out), batch_size=2, layout=layout))
    rank = runtime.start(scoring.config)
    score(scoring, rank)
    stage = Stage(scoring.config, rank, load_model(scoring.config, rank, folder))
    return generated(stage), generated(stage, DRAWN)


SLOW = [
    ("qwen3_moe", {"ep": 2, "gpus_per_node": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2, "gpus_per_node": 2}),
    ("qwen3_moe", {"tp": 2, "pp": 2, "etp": 2, "gpus_per_node": 4}),
    ("deepseek_v3", {"pp": 2, "ep": 2, "gpus_per_node": 4}),
    ("mixtral", {"tp": 2, "ep": 4, "gpus_per_node": 4}),
]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen3_moe", {"tp": 2, "gpus_per_node": 2}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_several_ranks_are_one_model(tmp_path, kind, sizes):
    model = tiny_model(kind)
    layout = Layout(**sizes)
    folder = write_checkpoint(model, tmp_path / "iter_0000000")
    tokens, out = tmp_path / "ids.npy", tmp_path / "logits.npy"
    np.save(tokens, ids(5).astype(np.uint16))
    first, *others = run_on_ranks(layout.gpus_per_node, use_on_rank, folder, layout, tokens, out, join=False)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids(5))).logits
    assert relative_error(torch.from_numpy(np.load(out)), expected) < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "iter_0000000", "logits.npy"]
    with one_stage(folder) as stage:
        assert first == (theirs(model), generated(stage, DRAWN))
    assert all(other == first for other in others)
