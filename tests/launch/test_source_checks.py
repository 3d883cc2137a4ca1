"""A dry run and the launcher refuse what a start would refuse of the checkpoint that it continues from."""

import json
import re
from pathlib import Path

import pytest

from helpers.checkpoint.ckpt_files import write_without_tensors
from helpers.jsonl import BinIdxWriter
from helpers.whole_runs import SMALL
from moe_exp.config import Config, load_config
from moe_exp.data.samples.order import order_of_files
from moe_exp.launch.machine_checks import check_files
from moe_exp.launch.source_checks import source_problems, stage_lines
from moe_exp.runs.run_folder import RunFolder

SIZE = {"vocab_size": 1000, "seq_len": 16, "mbsz": 2, "gbsz": 8, "train_iters": 100, "eval_interval": 0}
SIZE |= {"lr_decay_style": "constant", "warmup_iters": 0}  # so that GBSZ may change at a resume


@pytest.fixture
def here(tmp_path):
    """A Config of a run in an empty folder, with token files a, b and c."""
    for number, name in enumerate("abc"):
        with BinIdxWriter(tmp_path / name, vocab_size=1000) as writer:
            for document in range(40):
                writer.add_document(range(10 + number, 80 + document))

    def config(**changes) -> Config:
        places = {"run_dir": tmp_path / "runs", "data_dir": tmp_path / "data", "train_data": tmp_path / "a"}
        given = SMALL | SIZE | {"gpus_per_node": 1, "run_name": "run"} | places | changes
        if isinstance(stages := given.get("data_stages"), list):
            named = [stage | ({"train_data": str(tmp_path / stage["train_data"])}) for stage in stages]
            given["data_stages"] = json.dumps(named)
        return load_config({name: str(value) for name, value in given.items()}, {})

    return config


def save(config: Config, folder: Path | None = None, *, placed: Config | None = None) -> Path:
    """A checkpoint of `config` without tensors, in its run folder; `placed`: with stages as begun."""
    checkpoints = RunFolder.of(config).checkpoints if folder is None else folder
    order = order_of_files(placed or config)
    assert order is not None
    progress = {"iteration": 10, "consumed_samples": 80, "sample_order": order.facts(), "skipped_samples": []}
    common = {"config": config.model_dump(), "progress": progress, "scheduler": {"num_steps": 80}}
    write_without_tensors(checkpoints / "iter_0000010", common)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("10")
    return checkpoints


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, None),
        ({"lr": 0.1, "train_iters": 200, "gpus_per_node": 2}, None),
        ({"hidden_size": 256, "head_dim": 32}, "HIDDEN_SIZE=256: the checkpoint at iteration 10"),
        ({"num_experts": 16}, "NUM_EXPERTS=16: "),
        ({"optimizer": "sgd"}, "OPTIMIZER=sgd: "),
        ({"seed": 7}, "SEED=7: the checkpoint at iteration 10 of .* has SEED=1234"),
        ({"seq_len": 32}, "SEQ_LEN=32: "),
        ({"train_data": "b"}, "TRAIN_DATA=.*/b: its files differ from the data of the checkpoint"),
        ({"train_data": "b", "allow_other_data": True}, None),
        ({"split": "9,1"}, "SPLIT="),
    ],
)
def test_what_a_start_would_refuse(changes, refused, here, tmp_path):
    load_dir = save(here(run_name="other"), tmp_path / "saved")
    if "train_data" in changes:
        changes = changes | {"train_data": tmp_path / changes["train_data"]}
    for config in (here(load_dir=load_dir, **changes), here(run_name="other", **changes)):
        if config.run_name == "other":
            save(here(run_name="other"))
        problems = source_problems(config)
        assert problems == [] if refused is None else len(problems) == 1, problems
        if refused is not None:
            assert re.match(refused, problems[0]), problems[0]
            assert problems[0] in check_files(config)


@pytest.mark.parametrize(
    ("stage", "changes", "refused", "line"),
    [
        ({"from_samples": 88}, {}, None, None),
        ({"from_samples": 90}, {}, "start the stage at sample 88 or 96", None),
        ({"from_samples": 96}, {"gbsz": 12}, "start the stage at sample 92 or 104", None),
        ({"from_tokens": 16 * 90}, {}, None, r"stage 1 begins at token 1,536 \(sample 96\)"),
        ({"from_tokens": 16 * 96}, {"gbsz": 12}, None, r"stage 1 begins at token 1,664 \(sample 104\)"),
    ],
)
def test_where_a_later_stage_begins(stage, changes, refused, line, here):
    """Batches are counted from the checkpoint, at sample 80."""
    save(here())
    config = here(data_stages=[stage | {"train_data": "b"}], **changes)
    problems, lines = source_problems(config), stage_lines(config)
    assert [refused in found for found in problems] == ([True] if refused else [])
    assert len(lines) == bool(line) and (line is None or re.search(line, lines[0]))


@pytest.mark.parametrize(("sample", "first"), [(33, 40), (73, 80)])  # 80: the next one of the checkpoint
def test_a_stage_that_has_begun_keeps_its_place(sample, first, here):
    """Given in tokens, under another GBSZ; other files are refused once training has read them."""
    stages = [{"from_tokens": 16 * sample, "train_data": "b"}]
    placed, _ = here(data_stages=stages).with_stage_begins()
    assert placed.stages[1].first_sample == first
    save(here(data_stages=stages), placed=placed)
    for gbsz in (8, 12):
        config = here(data_stages=stages, gbsz=gbsz)
        assert source_problems(config) == []
        (line,) = stage_lines(config)
        assert f"(sample {first})" in line
    others = source_problems(here(data_stages=[stages[0] | {"train_data": "c"}]))
    if first == 80:
        assert others == []
        return
    assert "stage 1 began before sample 80" in others[0]
    (later,) = source_problems(here(data_stages=[stages[0] | {"from_tokens": 16 * 50}]))
    assert "its first_sample is 50 here but 40 in the checkpoint" in later


def test_a_later_stage_after_a_rollback(here):
    """Samples 88 to 96 are left out, so that batches of the stream begin at 80, 96 and 104."""
    save(here())
    folder = RunFolder.of(here())
    rollback = {"samples": [[88, 96]], "sample_order": {}}
    folder.skipped_samples.write_text(json.dumps({"rollbacks": [rollback]}))

    def found(**begin):
        config = here(data_stages=[begin | {"train_data": "b"}], gbsz=12)
        return source_problems(config), stage_lines(config)

    assert found(from_samples=100) == ([], [])
    ((refused,), _) = found(from_samples=104)
    assert "start the stage at sample 100 or 112" in refused
    ((), (line,)) = found(from_tokens=16 * 101)
    assert "(sample 112)" in line
    folder.skipped_samples.write_text("{")
    ((unreadable,), lines) = found(from_samples=100)
    assert "skipped_samples.json: cannot be read" in unreadable and lines == []


@pytest.mark.parametrize("where", ["replaced", "load_dir", "remote_dir"])
def test_stages_of_a_checkpoint_that_only_ranks_find_are_theirs_to_check(where, here, tmp_path):
    """Sample 92 begins a batch of 12 from sample 80 on, but none from 0 on."""
    changes = {}
    if where == "replaced":  # killed between the two renames of a save
        (folder,) = save(here()).glob("iter_*")
        folder.rename(f"{folder}.replaced")
    else:
        changes[where] = f"file://{tmp_path}/store"
    config = here(data_stages=[{"from_samples": 92, "train_data": "b"}], gbsz=12, **changes)
    assert (source_problems(config), stage_lines(config)) == ([], [])
    assert source_problems(config.model_copy(update={"run_name": "new", "load_dir": "", "remote_dir": ""}))


def test_missing_data_of_a_resume_is_named(here, tmp_path):
    save(here())
    (tmp_path / "a.bin").unlink()
    (problem,) = check_files(here())
    assert problem.startswith(f"TRAIN_DATA={tmp_path}/a: ")
