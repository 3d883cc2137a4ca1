"""`moe-exp ckpt average`: weights by plain torch, from checkpoints in any layout, in little memory."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.ckpt_files import BIAS, STACKED, WHOLE, common_state, drawn_state, write_checkpoint
from helpers.checkpoint.peak import peak_bytes
from helpers.ranks import run_on_ranks
from moe_exp.checkpoint.format import fingerprints
from moe_exp.checkpoint.format.folders import Manifest, latest_iteration
from moe_exp.checkpoint.format.settings import saved_order
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.integrity import Verification
from moe_exp.checkpoint.tools.reshape import WEIGHTS, Reshaping, average, reshape, sources_of, weights_of
from moe_exp.cli import main
from moe_exp.data.embedded import ensure_embedded_corpus
from moe_exp.inference.evaluate import EvalRequest, plan_evaluation
from moe_exp.runs.run_folder import iterations


def test_the_weights_of_each_name():
    assert weights_of("uniform", 4) == [0.25] * 4
    assert weights_of("ema", 3, ema_decay=0.5) == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    assert weights_of("1-sqrt", 2) == pytest.approx([0.5**0.5, 1 - 0.5**0.5])
    assert weights_of("cosine", 2) == pytest.approx([0.5, 0.5])
    assert weights_of("inverse-sqrt", 2) == pytest.approx([1 - 0.5**0.5, 0.5**0.5])
    assert weights_of("1,2,1", 3) == [0.25, 0.5, 0.25]
    for name in WEIGHTS:
        assert weights_of(name, 1) == [1.0]


@pytest.mark.parametrize(
    ("name", "number", "options", "message"),
    [
        ("mean", 2, {}, "WEIGHTS=mean: must be one of"),
        ("1,2", 3, {}, "WEIGHTS=1,2: has 2 numbers for 3"),
        ("1,-1", 2, {}, "WEIGHTS=1,-1: must have a positive sum"),
        ("nan,1", 2, {}, "WEIGHTS=nan,1: must have a positive sum"),
        ("ema", 2, {"ema_decay": 1.0}, "EMA_DECAY=1.0: must be between 0 and 1"),
    ],
)
def test_weights_that_cannot_be(name, number, options, message):
    with pytest.raises(ValueError, match=f"^{message}.*Fix: "):
        weights_of(name, number, **options)


def without_optimizer(tensors):
    return {key: value for key, value in tensors.items() if not key.startswith("optimizer.")}


def strange(tensors):
    """fp32, with values whose bits a sum could lose."""
    found = {key: value.float() for key, value in without_optimizer(tensors).items()}
    found["output_layer.weight"][0, :5] = torch.tensor([-0.0, 0.0, 1e-42, 3e38, float("inf")])
    return found


@pytest.mark.parametrize("kind", [dict, without_optimizer, strange])
@pytest.mark.parametrize("weights", [[1.0], [0.3, 0.7], weights_of("1-sqrt", 3)])
def test_of_a_checkpoint_with_itself_it_is_the_checkpoint_bit_for_bit(kind, weights, tmp_path):
    tensors = kind(drawn_state())
    sources = [write_checkpoint(tmp_path / f"{n}", n, tensors=tensors) for n in range(1, 1 + len(weights))]
    reader = CheckpointReader(average(sources, tmp_path / "out", weights).folder)
    assert set(reader.tensors) == {*STACKED, *WHOLE, BIAS}
    for key in reader.tensors:
        found = reader.read(key)
        assert found.dtype == tensors[key].dtype
        assert torch.equal(found.view(torch.uint8), tensors[key].contiguous().view(torch.uint8)), key


def test_checkpoints_of_several_layouts_and_styles(tmp_path):
    drawn = [drawn_state(seed) for seed in range(3)]
    facts = {"valid_loss": 3.0}
    sources = [write_checkpoint(tmp_path / f"{n}", n + 1, tensors=drawn[n], facts=facts) for n in range(3)]
    sources[1] = reshape(sources[1], tmp_path / "x", Reshaping(experts="single")).folder
    weights = [0.2, 0.5, 0.3]
    written = average(sources, tmp_path / "out", weights)
    reader = CheckpointReader(written.folder)
    assert latest_iteration(tmp_path / "out") == 3
    for key in (*STACKED, *WHOLE, BIAS):
        # the sum of the main weights, rounded once
        name = key if key == BIAS else f"optimizer.state.param.{key}"
        expected = sum(w * one[name].double() for w, one in zip(weights, drawn, strict=True))
        assert torch.equal(reader.read(key), expected.to(drawn[0][key].dtype)), key
    assert set(reader.common()) == {"config", "content_metadata", "sample_order"}
    assert list(Verification(written.folder).findings()) == []
    saved = fingerprints.read(written.folder)
    found = fingerprints.fingerprints_of(
        (key, reader.read_chunk(stored, chunk), chunk.offsets)
        for key, stored in reader.tensors.items()
        for chunk in stored.chunks
    )
    assert saved == found and saved
    manifest = Manifest.read(written.folder)
    assert manifest and [one["weight"] for one in manifest.facts["averaged_from"]] == weights
    assert manifest.valid_loss is None
    assert [one["iteration"] for one in manifest.facts["averaged_from"]] == [1, 2, 3]


def test_what_has_no_main_weights_in_one_or_is_no_float(tmp_path):
    """Then the weights are averaged; and whole numbers are those of the last checkpoint."""
    key, counts = "output_layer.weight", "decoder.layers.mlp.router.seen"
    drawn = [drawn_state(0), without_optimizer(drawn_state(1))]
    for n, tensors in enumerate(drawn):
        tensors[counts] = torch.full((2, 4), n)
    sources = [write_checkpoint(tmp_path / f"{n}", n + 1, tensors=drawn[n]) for n in range(2)]
    reader = CheckpointReader(average(sources, tmp_path / "out", [0.5, 0.5]).folder)
    assert torch.equal(reader.read(key), ((drawn[0][key].double() + drawn[1][key].double()) / 2).bfloat16())
    assert torch.equal(reader.read(counts), drawn[1][counts])


def with_ema(folder: Path, iteration: int, num_averaged: int = 3) -> Path:
    """A checkpoint with an average of the weights, which is drawn."""
    shapes, common = STACKED | WHOLE, common_state(iteration)
    ema = {f"optimizer.state.ema.{key}": torch.randn(shape) for key, shape in shapes.items()}
    common["progress"]["num_averaged"] = num_averaged
    return write_checkpoint(folder, iteration, tensors=drawn_state(iteration) | ema, common=common)


def test_the_average_that_a_run_has_kept(tmp_path):
    sources = [with_ema(tmp_path / "run" / "checkpoints", iteration) for iteration in (1, 2)]
    command = ["ckpt", "average", str(tmp_path / "run")]
    assert main([*command, str(tmp_path / "out"), "--ema"]) == 0
    assert main([*command, str(tmp_path / "two"), "--ema", "--last", "2", "--weights", "1,3"]) == 0
    one, two = (CheckpointReader(tmp_path / name / "iter_0000002") for name in ("out", "two"))
    stored = [CheckpointReader(source) for source in sources]
    assert set(one.tensors) == set(two.tensors) == {*STACKED, *WHOLE, BIAS}
    for key in (*STACKED, *WHOLE):
        ema = [reader.read(f"optimizer.state.ema.{key}") for reader in stored]
        dtype = stored[1].tensors[key].dtype
        assert torch.equal(one.read(key), ema[1].to(dtype)), key
        assert torch.equal(two.read(key), (0.25 * ema[0].double() + 0.75 * ema[1].double()).to(dtype)), key
    assert torch.equal(one.read(BIAS), stored[1].read(BIAS))
    assert list(Verification(tmp_path / "out" / "iter_0000002").findings()) == []
    manifest = Manifest.read(tmp_path / "out" / "iter_0000002")
    assert manifest and [one["state"] for one in manifest.facts["averaged_from"]] == ["ema"]


def test_a_run_that_has_kept_none_or_has_not_averaged_yet(tmp_path, capsys):
    for folder in (write_checkpoint(tmp_path / "plain"), with_ema(tmp_path / "early", 5, num_averaged=0)):
        assert main(["ckpt", "average", str(folder), str(tmp_path / "out"), "--ema"]) == 1
        assert (
            f"SRC={folder}: has no moving average of the weights. Fix: omit --ema" in capsys.readouterr().err
        )
    assert not (tmp_path / "out").exists()


def some_run(folder: Path) -> Path:
    for n in range(1, 5):
        write_checkpoint(folder / "checkpoints", n, tensors=drawn_state(n), latest=n <= 3)
    return folder


def test_which_checkpoints_a_path_stands_for(tmp_path):
    """Those after the newest one are of a future that was given up."""
    run = some_run(tmp_path / "run")
    folders = [run / "checkpoints" / f"iter_000000{n}" for n in (1, 2, 3)]
    assert sources_of([run]) == folders
    assert sources_of([run / "checkpoints"], last=2) == folders[1:]
    assert sources_of([folders[1]]) == [folders[1]]
    shutil.rmtree(folders[2])
    for paths, last, rule in (
        ([folders[0], folders[0]], 0, "SRC=.*iter_0000001: is listed twice"),
        ([folders[0]], -1, "LAST=-1: must not be negative"),
        ([tmp_path / "none"], 0, "does not exist"),
        ([run], 0, "iter_0000003: does not exist"),
    ):
        with pytest.raises(ValueError, match=rule):
            sources_of(paths, last=last)


def test_the_command(tmp_path, capsys):
    run = some_run(tmp_path / "run")
    command = ["ckpt", "average", str(run), str(tmp_path / "out"), "--last", "2", "--weights", "1,3"]
    assert main(command) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.split() == ["0.2500", f"{run}/checkpoints/iter_0000002"]
    assert iterations(tmp_path / "out") == [3]
    assert main(command) == 1
    assert f"DST={tmp_path}/out: already exists" in capsys.readouterr().err
    assert main([*command[:3], str(tmp_path / "json"), *command[4:], "--json"]) == 0
    assert [one["weight"] for one in json.loads(capsys.readouterr().out)["sources"]] == [0.25, 0.75]


def other_model(folder: Path, shape: Any = (), order: dict[str, Any] | None = None, **config: Any) -> Path:
    """A checkpoint of a model that differs."""
    common = common_state(5)
    common["config"] = common["config"] | config
    if order is not None:
        common["progress"]["sample_order"] = order
    tensors = drawn_state() | ({"output_layer.weight": torch.zeros(shape)} if shape else {})
    return write_checkpoint(folder, tensors=tensors, common=common)


ENDS = "end and begin tokens"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"shape": (17, 8)}, r"has output_layer\.weight with shape \[17, 8\]"),
        ({"rotary_base": 12345.0}, r"has ROTARY_BASE=12345\.0, but .*b/iter_0000005 has ROTARY_BASE=\d"),
        ({"order": {"eod_id": 2, "bos_id": None}}, rf"was trained with {ENDS} \(2, None\), but .*b/iter"),
        ({"order": {"eod_id": 0, "bos_id": 1}}, rf"was trained with {ENDS} \(0, 1\), but .*b/iter"),
        (
            {"order": {"tokenizer": "0123456789abcdef"}},
            "was trained with a different tokenizer than .*b/iter",
        ),
        ({"order": {"eod_id": None, "bos_id": None, "tokenizer": None}}, None),  # not known
        ({"order": {}}, None),
    ],
)
def test_checkpoints_of_two_models(changes, rule, tmp_path):
    order = {"eod_id": 0, "bos_id": None, "tokenizer": "fedcba9876543210" * 2}
    sources = [other_model(tmp_path / "a", **changes), other_model(tmp_path / "b", order=order)]
    if rule is None:
        assert saved_order(average(sources, tmp_path / "out", [0.5, 0.5]).folder) == order
        return
    with pytest.raises(ValueError, match=f"SRC=.*a/iter_0000005: {rule}"):
        average(sources, tmp_path / "out", [0.5, 0.5])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def peak_of_average(folder: Path, sources: list[Path]) -> int:
    """Of averaging `sources[1:]`, after all is imported."""
    average(sources[:1], folder / "mean of one", [1.0])
    return peak_bytes(average, sources[1:], folder / "mean", [1 / len(sources[1:])] * len(sources[1:]))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_the_memory_is_about_one_tensor_per_checkpoint(number, tmp_path):
    num_bytes, sources = 48 * 2**20, [write_checkpoint(tmp_path / "small")]
    tensors = {f"decoder.layers.{layer}.mlp.router.weight": torch.rand(1, 4, 64) for layer in range(2)}
    for n in range(number):
        tensors["embedding.word_embeddings.weight"] = torch.rand(num_bytes // 256, 64)
        sources.append(write_checkpoint(tmp_path / f"{n}", tensors=tensors, manifest=False))
    (peak,) = run_on_ranks(1, peak_of_average, tmp_path, sources, join=False)
    assert 0.9 * number * num_bytes < peak < 1.3 * number * num_bytes


@pytest.mark.slow
def test_a_run_starts_from_the_average_of_another(runs):
    trained = runs.succeed("trained", SAVE_INTERVAL=5, FINGERPRINTS=True)
    assert main(["ckpt", "average", str(trained.folder.path), str(runs.run_dir / "mean"), "--last", "3"]) == 0
    # trained on the embedded corpus, which is no unknown data
    plans = [plan_evaluation(EvalRequest(str(path))) for path in (trained.folder.path, runs.run_dir / "mean")]
    prefixes = [plan.sources[0].prefix for plan in plans]
    assert prefixes == [ensure_embedded_corpus(runs.data_dir).valid_prefix] * 2
    started = runs.succeed("started", LOAD_DIR=runs.run_dir / "mean", GPUS_PER_NODE=2, EP=2)
    assert started.curve("lm_loss")[0] < trained.curve("lm_loss")[10]
