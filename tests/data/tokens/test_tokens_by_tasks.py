"""Parts made and joined by tasks of datatrove's executors: the bytes of one process."""

import gzip
import json
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data.shuffle.test_by_tasks import kill_after
from data.tokens.test_preprocess import contents, own_vocabulary
from helpers import ROOT
from helpers.jsonl import write_jsonl
from moe_exp.commands.data import main
from moe_exp.commands.guard import UNDER_WAY
from moe_exp.data.execution import Execution
from moe_exp.data.kinds import BadDocument
from moe_exp.data.tokens import by_tasks, preprocess
from moe_exp.data.tokens import parts as token_parts
from moe_exp.data.tokens.parts import PartEncoder, PartSettings
from moe_exp.data.tokens.preprocess import tokenize_documents, tokenize_files
from moe_exp.data.tokens.tokenizer import load_tokenizer
from moe_exp.data.tokens.tokenizer_training import EOD_TOKEN, train_bpe
from moe_exp.host.files import file_hash, has_hash

pytest.importorskip("datatrove")

TEXTS = [f"def f{i}(x):\n    return x + {i}  # {EOD_TOKEN} 世界\u2028" for i in range(30)]
HERE = Execution(workers=1)
SMALL = {"part_bytes": 200, "execution": HERE}  # 7 parts


@pytest.fixture
def how(tmp_path):
    train_bpe(TEXTS, 300).save(str(tmp_path / "tokenizer.json"))
    return PartSettings(load_tokenizer("HuggingFaceTokenizer", model=tmp_path), append_eod=True)


@pytest.fixture
def inputs(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl"]
    for index, path in enumerate(paths):
        lines = (json.dumps({"text": text}) for text in TEXTS[index * 10 : index * 10 + 10])
        content = "\n".join([*lines, "", ""]).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return paths


def facts_of(manifest):
    return {name: value for name, value in manifest.items() if name not in ("id", "made_at", "seconds")}


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2**30), (2, 100), (9, 1))]


@pytest.mark.parametrize(("tasks", "block_bytes"), [(3, 700), *SLOW])
def test_bytes_are_those_of_one_process(tasks, block_bytes, how, inputs, tmp_path, monkeypatch):
    for module in (by_tasks, token_parts):
        monkeypatch.setattr(module, "CHECKED_BYTES", 77)
    monkeypatch.setattr(by_tasks, "_COPY_BYTES", 30)
    one = tokenize_files(inputs, tmp_path / "one", how, part_bytes=200)
    options = {**SMALL, "tasks": tasks, "block_bytes": block_bytes}
    manifest = tokenize_documents(inputs, tmp_path / "tasks", how, **options)
    assert contents(tmp_path / "tasks") == contents(tmp_path / "one")
    whole = manifest["outputs"][0]["hash"]
    assert has_hash(tmp_path / "one.bin", whole)
    assert whole.startswith(f"{block_bytes}-") == (block_bytes < 2**30)
    for made in (one, manifest):
        for output in made["outputs"]:
            output |= {"name": output["name"][-4:], "hash": ""}
    assert facts_of(manifest) == facts_of(one)
    assert main("verify", [str(tmp_path / "tasks")]) == 0
    before = (tmp_path / "tasks.bin").stat().st_mtime_ns
    tokenize_documents(inputs, tmp_path / "tasks", how, **options)
    tokenize_documents(inputs, tmp_path / "tasks", how, part_bytes=200)
    assert (tmp_path / "tasks.bin").stat().st_mtime_ns == before, "made again"


@pytest.mark.parametrize(
    ("num_bytes", "block_bytes"), [(0, 4), (3, 4), (4, 4), (5, 4), (8, 4), (2**22 + 5, 2**21)]
)
def test_a_hash_of_blocks(tmp_path, num_bytes, block_bytes):
    content = np.random.default_rng(0).bytes(num_bytes)
    (tmp_path / "a").write_bytes(content)
    found = file_hash(tmp_path / "a", block_bytes)
    assert has_hash(tmp_path / "a", found)
    assert (found == file_hash(tmp_path / "a")) == (num_bytes <= block_bytes)
    (tmp_path / "a").write_bytes(content + b"x")
    assert not has_hash(tmp_path / "a", found)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_stops(workers, how, inputs, tmp_path):
    inputs[2].write_bytes(b'{"text": "a"}\n' * 20 + b"not JSON\n")
    options = {"tasks": 3, "part_bytes": 200, "execution": Execution(workers=workers)}
    with pytest.raises(BadDocument, match=r"c\.jsonl:21: not valid JSON"):
        tokenize_documents(inputs, tmp_path / "tasks", how, **options)
    assert not (tmp_path / "tasks.bin").exists()


def stopped(at, tokenize, monkeypatch):
    """A call that fails where it would join or publish."""
    names = {"join": (by_tasks, "join_parts"), "write": (by_tasks, "_chunks")}
    owner, name = names.get(at, (preprocess, "_publish"))

    def fail(*arguments, **options):
        raise OSError("stopped here")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="stopped here"):
            tokenize()


def test_another_number_of_tasks_keeps_the_parts(how, inputs, tmp_path, monkeypatch):
    tokenize_files(inputs, tmp_path / "one", how, part_bytes=200)
    tokenize = partial(tokenize_documents, inputs, tmp_path / "tasks", how, **SMALL)
    stopped("join", partial(tokenize, tasks=2), monkeypatch)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "tasks.partial").glob("part.*.bin")}
    assert len(made) > 4
    stopped("publish", partial(tokenize, tasks=3), monkeypatch)
    assert {path: path.stat().st_mtime_ns for path in made} == made
    # as of a call that was killed after the .bin had got its place
    (tmp_path / "tasks.partial" / "tasks.bin").replace(tmp_path / "tasks.bin")
    tokenize(tasks=3)
    assert contents(tmp_path / "tasks") == contents(tmp_path / "one")


def test_one_process_and_tasks_do_not_continue_each_other(how, inputs, tmp_path, monkeypatch):
    alone = partial(tokenize_files, inputs, settings=how, part_bytes=200)
    by_three = partial(tokenize_documents, inputs, settings=how, **SMALL, tasks=3)
    stopped("publish", partial(alone, output=tmp_path / "one"), monkeypatch)
    stopped("publish", partial(by_three, output=tmp_path / "tasks"), monkeypatch)
    with pytest.raises(ValueError, match=r"TASKS=3: .*one was started without --tasks\. Fix: omit --tasks"):
        by_three(output=tmp_path / "one")
    with pytest.raises(ValueError, match=r"TASKS=: .*tasks was started with 3 tasks\. Fix: set --tasks 3"):
        alone(output=tmp_path / "tasks")
    alone(output=tmp_path / "one")
    alone(output=tmp_path / "tasks", start_over=True)
    assert contents(tmp_path / "tasks") == contents(tmp_path / "one")


def test_other_blocks_are_joined_again(how, inputs, tmp_path, monkeypatch):
    tokenize_files(inputs, tmp_path / "one", how, part_bytes=200)
    tokenize = partial(tokenize_documents, inputs, tmp_path / "tasks", how, **SMALL, tasks=3)
    stopped("publish", partial(tokenize, block_bytes=500), monkeypatch)
    manifest = tokenize(block_bytes=64)
    assert contents(tmp_path / "tasks") == contents(tmp_path / "one")
    assert has_hash(tmp_path / "tasks.bin", manifest["outputs"][0]["hash"])


def test_an_older_output_stays_until_the_new_one_is_complete(how, inputs, tmp_path, monkeypatch):
    tokenize = partial(tokenize_documents, inputs, tmp_path / "x", how, **SMALL, tasks=2)
    tokenize()
    before = contents(tmp_path / "x")
    inputs[0].write_text(json.dumps({"text": "another text"}))
    for at in ("write", "publish"):
        for start_over in (True, False):
            stopped(at, partial(tokenize, start_over=start_over), monkeypatch)
            assert contents(tmp_path / "x") == before
    tokenize()
    tokenize_files(inputs, tmp_path / "one", how, part_bytes=200)
    assert contents(tmp_path / "x") == contents(tmp_path / "one") != before


@pytest.mark.parametrize(
    ("times", "documents"), [(1, 5000), pytest.param(12, 20_000, marks=pytest.mark.slow)]
)
def test_killed_at_any_moment_and_called_again_it_makes_the_same_bytes(times, documents, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{number} " * 40} for number in range(documents)])
    how = PartSettings(load_tokenizer("ByteLevelTokenizer"), append_eod=True)
    part_bytes = 2**18 * documents // 20_000
    tokenize_files([path], tmp_path / "one", how, part_bytes=part_bytes)
    options = {"tasks": 3, "part_bytes": part_bytes, "block_bytes": 4 * part_bytes}
    by_tasks = partial(tokenize_documents, [path], settings=how, execution=Execution(workers=2), **options)
    for number in range(times):
        output = tmp_path / f"killed_{number}"
        kill_after((6 * number + 3) // times, 0.02 * (number % 5), by_tasks, output)  # of six tasks
        by_tasks(output=output)
        assert contents(output) == contents(tmp_path / "one")
        assert not Path(f"{output}.partial").exists()


def test_what_is_skipped_is_counted(how, tmp_path):
    """A model with </s> as a piece reads it in a text as the end-of-document token, whatever one asks for."""
    skipping = PartSettings(own_vocabulary("Unigram", tmp_path), append_eod=True, skip_bad=True)
    paths = [tmp_path / name for name in ("x.jsonl", "blank.jsonl", "y.jsonl")]
    lines = [json.dumps({"text": text}) for text in ("one", "two </s> three", "four")]
    for path, content in zip(paths, ([*lines, "not JSON", "", ""], ["", "", ""], [lines[0]]), strict=True):
        path.write_text("\n".join(content))
    ours = tokenize_files(paths, tmp_path / "ours", skipping)
    theirs = tokenize_documents(paths, tmp_path / "theirs", skipping, tasks=3, execution=HERE)
    assert contents(tmp_path / "theirs") == contents(tmp_path / "ours")
    special = "the tokenizer reads </s> in the text as a special token"
    assert theirs["skipped"] == {"blank line": 3, "not valid JSON": 1, special: 1}
    assert (theirs["num_documents"], theirs["num_eods"]) == (3, 3)
    assert main("verify", [str(tmp_path / "theirs")]) == 0
    same = ("num_documents", "num_tokens", "num_eods", "num_text_bytes", "text_hash", "skipped", "dtype")
    assert [theirs[name] for name in same] == [ours[name] for name in same]


def without_last_document(part):
    """A task's files as of one document less, sound in themselves."""
    lengths = np.fromfile(f"{part}.lengths", np.int32)[:-1]
    lengths.tofile(f"{part}.lengths")
    os.truncate(f"{part}.bin", 2 * int(lengths.sum()))


def with_an_end_token_more(part):
    tokens = np.fromfile(f"{part}.bin", np.uint16)
    tokens[1] = 0
    tokens.tofile(f"{part}.bin")


DAMAGES = [without_last_document, with_an_end_token_more]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_part_that_changes_before_it_is_joined_is_made_again(damage, how, inputs, tmp_path, monkeypatch):
    for module in (by_tasks, token_parts):
        monkeypatch.setattr(module, "CHECKED_BYTES", 48)
    tokenize_files(inputs, tmp_path / "one", how, part_bytes=200)
    options = {**SMALL, "tasks": 2, "block_bytes": 64}
    tokenize = partial(tokenize_documents, inputs, tmp_path / "x", how, **options)
    stopped("join", tokenize, monkeypatch)
    damage(tmp_path / "x.partial" / "part.000002")
    with pytest.raises(
        ValueError, match=r"part\.000002\.bin: does not match its recorded hash.*remakes the part"
    ):
        tokenize()
    assert not (tmp_path / "x.bin").exists()
    tokenize()
    assert contents(tmp_path / "x") == contents(tmp_path / "one")


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_process_checks_its_parts_too(damage, how, inputs, tmp_path, monkeypatch):
    tokenize_files(inputs, tmp_path / "one", how, part_bytes=200)
    encode = PartEncoder.encode

    def encode_and_damage(self, part, folder, advance):
        encode(self, part, folder, advance)
        if part.index == 2:
            damage(folder / part.stem)

    with monkeypatch.context() as patch:
        patch.setattr(PartEncoder, "encode", encode_and_damage)
        with pytest.raises(ValueError, match=r"part\.000002\.bin: does not match its recorded hash"):
            tokenize_files(inputs, tmp_path / "x", how, part_bytes=200)
    tokenize_files(inputs, tmp_path / "x", how, part_bytes=200)
    assert contents(tmp_path / "x") == contents(tmp_path / "one")


def test_lengths_that_do_not_agree(how, inputs, tmp_path, monkeypatch):
    tokenize = partial(tokenize_documents, inputs, tmp_path / "x", how, tasks=2, execution=HERE)
    stopped("join", tokenize, monkeypatch)
    os.truncate(tmp_path / "x.partial" / "part.000002.lengths", 4 * 9)
    with pytest.raises(ValueError, match="29 documents instead of 30"):
        tokenize()
    assert not (tmp_path / "x.bin").exists()


@pytest.mark.slow  # tests/data/test_prepare.py has jobs that are fast
def test_slurm_from_the_command_to_the_files(how, inputs, tmp_path, monkeypatch, capsys, cluster):
    flags = ["--input", *map(str, inputs), "--output-prefix", str(tmp_path / "x"), "--append-eod"]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    jobs = ["--executor", "slurm", "--partition", "cpu", "--time", "1:00:00"]
    assert main("tokenize", [*flags, *jobs]) == 1
    assert "EXECUTOR=slurm: requires --tasks to be set. Fix: set --tasks" in capsys.readouterr().err
    flags += [*jobs, "--tasks", "2"]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "moe_exp/__main__.py"), "data", "tokenize", *flags])
    found = []
    for _ in range(2):
        assert main("tokenize", flags) == UNDER_WAY
        assert capsys.readouterr().out.startswith(f"{tmp_path}/x_text_document: SLURM jobs are under way")
        found.append(cluster.jobs())
    assert found[0] == found[1], "it waits, and submits nothing twice"
    with pytest.raises(ValueError, match="SLURM jobs are still using it"):
        tokenize_documents(inputs, tmp_path / "x_text_document", how)
    cluster.run()
    # the last of them published
    tokenize_files(inputs, tmp_path / "one", how)
    outputs = [path.read_text() for path in cluster.folder.glob("*.out")]
    assert (tmp_path / "x_text_document.bin").exists(), outputs
    assert contents(tmp_path / "x_text_document") == contents(tmp_path / "one")
    assert main("tokenize", flags) == 0
    line = f"TRAIN_DATA={tmp_path}/x_text_document VOCAB_SIZE={how.tokenizer.vocab_size}"
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert main("verify", [str(tmp_path / "x_text_document")]) == 0
