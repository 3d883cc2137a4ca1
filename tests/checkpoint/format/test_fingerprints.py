"""Fingerprints: sums by hand, any split, what changes them; and a load that is not what was saved stops."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.checkpoint.legs import Leg, run_legs, start_job, write_data
from helpers.checkpoint.small_job import records, run_to_end, small_settings, write_tokens
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint import load as loading
from moe_exp.checkpoint.format import fingerprints
from moe_exp.checkpoint.format.fingerprints import Fingerprint, added, fingerprints_of, multilinear_sum, shown
from moe_exp.checkpoint.format.folders import Manifest, entry_of
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.load import RestoreError
from moe_exp.checkpoint.optimizer_state import owned_state
from moe_exp.checkpoint.state import unwrapped
from moe_exp.checkpoint.tools.reshape import Reshaping, reshape
from moe_exp.cli import main
from moe_exp.config import load_config


def total(values: torch.Tensor, offsets: tuple[int, ...] = ()) -> int:
    return int(multilinear_sum(values, offsets or (0,) * values.dim())) % 2**64


def test_the_sum_by_hand():
    x = torch.randn(3, 4, 5)
    weights = [fingerprints.axis_weights(3 - axis, 0, size, x.device) for axis, size in enumerate(x.shape)]
    assert torch.cat(weights).remainder(2).all()
    assert len(torch.cat(weights).unique()) == 12
    expected = torch.einsum("ijk,i,j,k->", x.view(torch.int32).long(), *weights).item()
    assert total(x) == expected % 2**64
    # Files have to be read by every later version.
    assert total(torch.arange(6.0).view(2, 3)) == 4392228805584879616
    assert total(torch.tensor(1.5)) == total(torch.tensor([1.5]))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_split_gives_the_same(data):
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
    dtype = data.draw(st.sampled_from(kinds))
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    x = (torch.arange(torch.Size(shape).numel()) * 37 % 251).view(shape).to(dtype)
    cuts = [data.draw(st.integers(0, size)) for size in shape]
    boxes = [()]
    for cut, size in zip(cuts, shape, strict=True):
        boxes = [(*box, part) for box in boxes for part in (slice(0, cut), slice(cut, size))]
    parts = sum(total(x[box], tuple(part.start for part in box)) for box in boxes)
    assert parts % 2**64 == total(x)
    assert total(x.mT.contiguous().mT if x.dim() > 1 else x) == total(x)


def test_chunks_are_of_one_sum(monkeypatch):
    x = torch.randn(9, 13)
    whole = total(x), total(x.flatten())
    monkeypatch.setitem(fingerprints._CHUNK, "cpu", 10)
    assert (total(x), total(x.flatten())) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_of_every_value_and_every_swap_counts(dtype):
    # Round values: their low bits are zeros, the worst case for a product modulo a power of two.
    x = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 4.0]).repeat(8).view(6, 8).to(dtype)
    found, integers = [total(x)], torch.int32 if dtype == torch.float32 else torch.int16
    last_bit = x.element_size() * 8 - 1
    for place, bit in itertools.product(range(x.numel()), range(last_bit + 1)):
        y = x.clone()
        flip = -(2**bit) if bit == last_bit else 2**bit
        y.view(integers).view(-1)[place] ^= torch.tensor(flip, dtype=integers)
        found.append(total(y))
    for a, b in itertools.combinations(range(x.numel()), 2):
        if x.view(-1)[a] != x.view(-1)[b]:
            y = x.clone()
            y.view(-1)[[a, b]] = x.view(-1)[[b, a]]
            found.append(total(y))
    found.append(total(x[[1, 0, 2, 3, 4, 5]]))
    assert len(set(found)) == len(found)


def test_names_have_layers_and_shares_add_up():
    router = "decoder.layers.3.mlp.router.weight"
    stacked = "optimizer.state.exp_avg.decoder.layers.mlp.router.weight"
    of_moment = (f"optimizer.state.exp_avg.{router}", (0, 2))
    assert fingerprints.name_and_place(stacked, (3, 0, 2)) == of_moment
    assert fingerprints.name_and_place(router, (1, 2)) == (router, (1, 2))
    assert shown("optimizer.state.param.output_layer.weight") == "main weights of output_layer.weight"
    assert shown("output_layer.weight") == "output_layer.weight"
    x = torch.randn(2, 4, 3)
    whole = fingerprints_of([("decoder.layers.w", x[i : i + 1], (i, 0, 0)) for i in range(2)])
    single = fingerprints_of([(f"decoder.layers.{i}.w", x[i], (0, 0)) for i in range(2)])
    shares = [fingerprints_of([("decoder.layers.w", x[i], (i, 0, 0))]) for i in range(2)]
    assert whole == single == added(shares)
    halves = [fingerprints_of([("decoder.layers.0.w", x[0, a : a + 2], (a, 0))]) for a in (0, 2)]
    assert added(halves) == {"decoder.layers.0.w": Fingerprint("float32", 12, total(x[0]))}


def test_a_damaged_file_is_a_line_and_another_version_is_none(tmp_path):
    assert fingerprints.read(tmp_path) is None
    written = {"a": Fingerprint("bfloat16", 7, 2**64 - 1)}
    fingerprints.write(tmp_path, written)
    assert fingerprints.read(tmp_path) == written
    path = tmp_path / fingerprints.FILE
    text = path.read_text()
    path.write_text(text.replace('"bfloat16", 7', '"bfloat16"'))
    with pytest.raises(ValueError, match=r"fingerprints\.json: cannot be read"):
        fingerprints.read(tmp_path)
    path.write_text(text.replace('"format_version": 1', '"format_version": 2'))
    assert fingerprints.read(tmp_path) is None


# Saved by two ranks with EP=2, loaded by two with TP=ETP=2. Then each of these is done to rank 1's memory.


def _parameter(trained: Any, name: str) -> torch.Tensor:
    return dict(unwrapped(trained.model[0]).named_parameters())[name].detach()


def _moment(trained: Any, name: str) -> torch.Tensor:
    values = (owned.values[name] for owned in owned_state(trained.optimizer))
    return next(one for one in values if one.numel() > 300)


def flip_a_weight(trained: Any) -> None:
    _parameter(trained, "decoder.layers.2.mlp.experts.weight1").view(torch.int16).view(-1)[5] ^= 1


def flip_a_moment(trained: Any) -> None:
    _moment(trained, "exp_avg").view(torch.int32)[17] ^= 1


def swap_two_main_weights(trained: Any) -> None:
    values = _moment(trained, "param")
    values[[3, 4]] = values[[4, 3]].clone()


def take_the_other_ranks_shard(trained: Any) -> None:
    # The part of a projection's columns that rank 0 has.
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    torch.distributed.broadcast(_parameter(trained, name), src=0)


def nothing(trained: Any) -> None:
    pass


DONE = (nothing, flip_a_weight, flip_a_moment, swap_two_main_weights, take_the_other_ranks_shard)


def load_and(
    done: tuple[Callable[[Any], None], ...], settings: dict[str, Any], folder: Path, port: int
) -> list[str]:
    """What each load says, on this rank."""
    job, said, compare = start_job(settings, port), [], loading.compare_restored
    acts = iter(done)

    def act_first(runtime: Any, folder: Any, trained: Any, *args: Any, **options: Any) -> None:
        act = next(acts)
        if runtime.rank == 1 or act is take_the_other_ranks_shard:
            act(trained)
        said.append(str(compare(runtime, folder, trained, *args, **options)))

    with patch.object(loading, "compare_restored", act_first):
        for _ in done:
            try:
                loading.load(job.config, job.runtime, folder, job.trained)
            except RestoreError as error:
                said += error.problems
    return said


def test_whatever_is_changed_after_a_load_is_named_on_every_rank(tmp_path):
    settings = {"train_data": str(write_data(tmp_path)), "dtype": "bf16", "gpus_per_node": 2}
    run_legs([Leg({**settings, "ep": 2}, steps=2, saves={2: tmp_path / "saved"})])
    folder = tmp_path / "saved" / "iter_0000002"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    saved = fingerprints.read(folder)
    sizes = [torch.Size(stored.shape).numel() for stored in CheckpointReader(folder).tensors.values()]
    assert sum(one.num_values for one in saved.values()) == sum(sizes)
    there = {**settings, "tp": 2, "etp": 2}
    first, second = run_on_ranks(2, load_and, DONE, there, tmp_path / "saved", free_port(), join=False)
    assert first == second
    assert first[0] == str(len(saved))
    named = [
        line.partition("(fingerprint mismatch): ")[2].partition(". The checkpoint")[0] for line in first[1:]
    ]
    assert named[0] == "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"
    assert named[1].startswith("exp_avg of ")
    assert named[2].startswith("main weights of ")
    assert named[3] == "decoder.layers.1.self_attention.linear_proj.weight"
    for line in first[1:]:
        assert line.startswith(f"checkpoint={folder}: 1 of {len(saved)} tensors differ from what was saved")
        assert "Fix: start the run again" in line
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_tool_that_rewrites_a_checkpoint_keeps_what_still_holds(tmp_path):
    settings = {"train_data": str(write_data(tmp_path)), "dtype": "bf16", "gpus_per_node": 1}
    run_legs([Leg(settings, steps=1, saves={1: tmp_path / "saved"})])
    source = tmp_path / "saved" / "iter_0000001"
    saved = fingerprints.read(source)
    kinds = {"layout": Reshaping(experts="single"), "weights": Reshaping(weights_only=True, dtype="fp32")}
    found = {}
    for name, changes in kinds.items():
        folder = reshape(source, tmp_path / name, changes).folder
        found[name] = fingerprints.read(folder)
        assert fingerprints.FILE in Manifest.read(folder).files
    assert found["layout"] == saved
    weights = {name for name in saved if not name.startswith("optimizer.")}
    assert set(found["weights"]) == weights
    assert {one.dtype for one in found["weights"].values()} == {"float32"}
    # Loaded, they are found again: of fp32 weights that were main weights.
    args = (load_and, (nothing,), settings | {"dtype": "fp32"}, tmp_path / "weights", free_port())
    assert run_on_ranks(1, *args, join=False) == [[str(len(weights))]]


# Names that are left out of the comparison.
NONE, ALL, WEIGHTS = "(?!)", "", r"(?!optimizer\.)(?!.*expert_bias)"
BF16_MOMENTS = {"optimizer_state_dtype": "bf16", "gpus_per_node": 2, "tp": 2}
MUON = {"optimizer": "muon", "distributed_optimizer": False}
SGD = {"optimizer": "sgd", "allow_other_optimizer": True}


@pytest.mark.parametrize(
    ("before", "after", "left_out"),
    [
        pytest.param({"dtype": "bf16"}, {"dtype": "fp32"}, WEIGHTS, id="other dtype"),
        pytest.param({}, SGD, r".*\.exp_avg", marks=pytest.mark.slow, id="other optimizer"),
        pytest.param({}, BF16_MOMENTS, NONE, marks=pytest.mark.slow, id="other moments"),
        pytest.param(MUON, {"gpus_per_node": 2, "ep": 2}, NONE, marks=pytest.mark.slow, id="muon"),
        pytest.param({"fingerprints": False}, {}, ALL, id="none"),
    ],
)
def test_what_is_compared(before, after, left_out, tmp_path):
    settings = {"train_data": str(write_data(tmp_path)), "gpus_per_node": 1} | before
    run_legs([Leg(settings, steps=1, saves={1: tmp_path / "saved"})])
    saved = fingerprints.read(tmp_path / "saved" / "iter_0000001") or {}
    assert bool(saved) == settings.get("fingerprints", True)
    new = settings | {"fingerprints": True} | after
    args = (load_and, (nothing,), new, tmp_path / "saved", free_port())
    found = run_on_ranks(new["gpus_per_node"], *args, join=False)
    assert found[0] == [str(len([name for name in saved if not re.match(left_out, name)]))]


def test_resume_of_another_state_ends_with_a_line_and_an_event(tmp_path, capsys):
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "run", train_iters=2)
    assert run_to_end(settings)[0] == 0
    folder = tmp_path / "run" / "checkpoints" / "iter_0000002"
    # A value that was written wrong: the files are whole, and their checksums are those of what was written.
    saved = fingerprints.read(folder)
    name = "decoder.layers.1.mlp.router.weight"
    saved[name] = Fingerprint("float32", saved[name].num_values, saved[name].total ^ 1)
    fingerprints.write(folder, saved)
    manifest = Manifest.read(folder)
    files = {**manifest.files, fingerprints.FILE: entry_of(folder / fingerprints.FILE)}
    Manifest(manifest.iteration, files, manifest.facts).write(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, printed = run_to_end(settings | {"train_iters": 4})
    assert code == 1  # a failure of this start, for a chain of jobs to try again
    line = next(line for line in printed.splitlines() if line.startswith("moe-exp: checkpoint="))
    assert f"1 of {len(saved)} tensors differ from what was saved (fingerprint mismatch): {name}." in line
    (event,) = [event for event in records(tmp_path / "run", "event") if event["event"] == "restore_failed"]
    assert event["tensors"] == [name]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert "to use an older checkpoint" not in line  # there is none
    (folder.parent / "iter_0000001").mkdir()
    fix = str(RestoreError(folder, [name], 1)).partition("Fix: ")[2]
    assert f"write 1 into {folder.parent}/latest_checkpointed_iteration.txt" in fix
    (folder.parent / "iter_0000001").rmdir()
    assert load_config(settings, {}).fingerprints
    assert main(["ckpt", "verify", str(folder)]) == 1
    assert f"{folder}: {name} differs from the tensor in memory" in capsys.readouterr().out
    assert run_to_end(settings | {"train_iters": 4, "fingerprints": "false"})[0] == 0
