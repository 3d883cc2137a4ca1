"""Scoring and generation against transformers, on one rank and on several; the cache changes nothing."""

import contextlib
import itertools
from pathlib import Path

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
from moe_exp.inference.jobs import Layout, config_for_use
from moe_exp.inference.score import ScoreRequest, plan_scoring, score
from moe_exp.inference.stage import Stage, load_model
from moe_exp.layers.kernel_choice import KernelFailure

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
    failures, given = [KernelFailure("experts", ["combine is wrong"], "torch")], []

    def build(*args, **options):
        given.append(options["kernel_failures"])
        raise LookupError

    monkeypatch.setattr("moe_exp.inference.stage.check_run", lambda config, rank: failures)
    monkeypatch.setattr("moe_exp.inference.stage.build_chunk", build)
    with pytest.raises(LookupError):
        load_model(load_config({"preset": "cpu"}, {}), None, Path("none"))
    assert given == [failures]


def drawn(stage: Stage, prompt: list[int], sampling: Sampling, num_tokens: int = NEW_TOKENS) -> list[int]:
    found = new_tokens(stage, prompt, Sampler(sampling), max_positions=len(prompt) + num_tokens)
    return [token for token, _ in found]


def greedy(stage: Stage, prompt: list[int]) -> list[int]:
    return drawn(stage, prompt, Sampling())


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A model of transformers, and the checkpoint with its weights."""
    model = tiny_model(request.param)
    return model, write_checkpoint(model, tmp_path_factory.mktemp(request.param) / "iter_0000000")


def theirs_greedy(model, prompt: list[int]) -> list[int]:
    model.generation_config.eos_token_id = None  # no token ends these texts
    tokens = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(tokens, **options)[0, len(prompt) :].tolist()


def test_logits_and_greedy_tokens_are_those_of_transformers(pair):
    model, folder = pair
    tokens = torch.from_numpy(ids())
    with torch.no_grad():
        expected = model(tokens).logits
    with one_stage(folder) as stage:
        assert relative_error(stage.logits(tokens), expected) < 1e-5
        assert greedy(stage, PROMPT) == theirs_greedy(model, PROMPT)


@pytest.mark.parametrize("kind", ["mixtral", "llama"])
def test_a_training_in_fp8_or_with_our_loss_is_used_without_them(kind, tmp_path):
    model = tiny_model(kind)
    trained = {"dtype": "bf16", "impl": "te", "fp8": "hybrid", "expert_backend": "te"}
    trained["cross_entropy"] = "triton"
    folder = write_checkpoint(model, tmp_path / "iter_0000000", **trained)
    with one_stage(folder, dtype="fp32") as stage:
        assert (stage.config.fp8, stage.config.cross_entropy) == ("none", "megatron")
        assert greedy(stage, PROMPT) == theirs_greedy(model, PROMPT)


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
        assert greedy(stage, PROMPT) == theirs_greedy(model, PROMPT)


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
                error = relative_error(cached[:, position], whole[:, position])
                assert error < 1e-6, f"position {position} after a prompt of {first}"


def test_rows_do_not_depend_on_each_other(pair):
    _, folder = pair
    tokens = torch.from_numpy(ids(4, 30))
    with one_stage(folder) as stage:
        together = stage.logits(tokens)
        alone = torch.cat([stage.logits(row[None]) for row in tokens])
    assert relative_error(alone, together) < 1e-6


SAMPLING = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=3)


def use_on_rank(folder: Path, layout: Layout, tokens: Path, out: Path):
    """Scores and generates, greedily and by drawing, on this rank of a job."""
    scoring = plan_scoring(ScoreRequest(str(folder), str(tokens), str(out), batch_size=2, layout=layout))
    rank = runtime.start(scoring.config)
    score(scoring, rank)
    stage = Stage(scoring.config, rank, load_model(scoring.config, rank, folder))
    return greedy(stage, PROMPT), drawn(stage, PROMPT, SAMPLING)


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
    results = run_on_ranks(layout.gpus_per_node, use_on_rank, folder, layout, tokens, out, join=False)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids(5))).logits
    assert relative_error(torch.from_numpy(np.load(out)), expected) < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "iter_0000000", "logits.npy"]
    assert all(result == results[0] for result in results)
    assert results[0][0] == theirs_greedy(model, PROMPT)
    with one_stage(folder) as stage:
        assert results[0][1] == drawn(stage, PROMPT, SAMPLING)
