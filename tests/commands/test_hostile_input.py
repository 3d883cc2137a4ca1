"""What nobody should give a command: no traceback, no wait, an exit code that is documented."""

import argparse
import gzip
import itertools
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.answered import JUNK_KINDS, answer, spoil
from helpers.checkpoint.ckpt_files import write_checkpoint
from helpers.docs.commands import whole_parser
from helpers.hf.tiny_models import tiny_model
from helpers.run_folders import event, train_record, write_run
from moe_exp.data.embedded import ensure_embedded_corpus

# Those that start ranks, jobs or servers, or follow for ever; the others run as they are.
ONLY_PLANNED = ("train", "compare", "sweep", "slurm", "prepare", "download")
LEFT_OUT = ("preflight", "doctor", "mup")  # they compute, whatever they are given
NOT_GIVEN = ("--every", "--watch", "--help", "--test-alert", "--project", "--mail-to", "--smtp")


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A folder of its own, and no network."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    # First, as it is read when the module is imported: without this, later tests would be offline, too.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def corpus(alone, session_runs):
    """The embedded corpus, which takes as long to build as an answer may."""
    ensure_embedded_corpus(session_runs.data_dir)
    Path("data").symlink_to(session_runs.data_dir)


def whole_run(path: Path) -> Path:
    """A run folder with a file of every kind that commands read."""
    records = [event("start", 0, "10:00:00"), *(train_record(step, 5 - 0.1 * step) for step in range(1, 11))]
    write_run(path, [*records, event("checkpoint", 5, "10:00:05", seconds=1.0, bytes=1000)])
    write_checkpoint(path / "checkpoints")
    contents = {
        "provenance.json": {"starts": [{"time": "2026-01-02T10:00:00+00:00", "device": "cpu"}]},
        "summary.json": {"status": "stopped", "iteration": 10},
        "skipped_samples.json": {"rollbacks": []},
        "hang/request.json": {"folder": "one", "kind": "hang", "reason": "none", "host": "a"},
        "hang/one/node_00000.json": {
            "node": 0, "nnodes": 1, "world_size": 1, "host": "a", "ranks": [0], "busy": [], "done": True
        },
        "hang/one/request.json": {"folder": "one", "kind": "hang", "reason": "none", "host": "a"},
    }  # fmt: skip
    for name, content in contents.items():
        (path / name).parent.mkdir(exist_ok=True, parents=True)
        (path / name).write_text(json.dumps(content))
    (path / "hang/one/rank_00000.txt").write_text("rank: 0\nhost: a\n\nThread 1 (idle)\n")
    (path / "train.log").write_text("[2026-01-02 10:00:00] all is well\n")
    (path / ".lock").touch()
    for name in ("tensorboard", "profile"):
        (path / name).mkdir()
    return path


PIECES = (
    "config.yaml", "provenance.json", "metrics.jsonl", "train.log", "summary.json", "skipped_samples.json",
    ".lock", "EXIT", "tensorboard", "wandb", "profile", "hang", "hang/request.json",
    "hang/one/node_00000.json", "hang/one/request.json", "hang/one/rank_00000.txt", "checkpoints",
    "checkpoints/latest_checkpointed_iteration.txt", "checkpoints/iter_0000005",
    "checkpoints/iter_0000005/manifest.json", "checkpoints/iter_0000005/common.pt",
    "checkpoints/iter_0000005/metadata.json", "checkpoints/iter_0000005/.metadata",
    "checkpoints/iter_0000005/__0_0.distcp",
)  # fmt: skip


def readers(run: Path, other: Path) -> list[list[str]]:
    name, parent = run.name, str(run.parent)
    return [
        ["report", str(run), "--format", "md"],
        ["report", str(run), str(other), "--out", "page.html"],
        ["report", str(run), "--watch", "--once"],
        ["watch", "run", str(run), "--once"],
        ["watch", "blame", str(run)],
        ["watch", "storage", str(run)],
        ["watch", "diff", str(run), str(other)],
        ["watch", "stacks", str(run / "hang/one")],
        ["ckpt", "info", str(run)],
        ["ckpt", "info", str(run), "--tensors", "--json"],
        ["ckpt", "verify", str(run)],
        ["ckpt", "diff", str(run), str(other)],
        ["ckpt", "prune", str(run), "--keep-last", "1"],
        ["plan", "run", str(run)],
        ["convert", "to-hf", str(run), "exported"],
        ["generate", "--checkpoint", str(run), "--prompt", "a", "--gpus-per-node", "9"],
        ["train", "--dry-run", "--preset", "cpu", "--run-dir", parent, "--run-name", name],
        ["compare", "--dry-run", "--preset", "cpu", "--run-dir", parent, "--run-name", name],
        ["sweep", "--dry-run", "--preset", "cpu", "--run-dir", parent, "--run-name", name],
    ]


def check(lines: list[list[str]], what: str) -> list[str]:
    answers = [(argv, answer(argv).failure) for argv in lines]
    return [f"{what}: moe-exp {' '.join(argv)[:500]}: {found}" for argv, found in answers if found]


# What has failed before.
FOUND = [
    ("metrics.jsonl", "fifo"), ("metrics.jsonl", "wrong_events"),
    ("hang/one/node_00000.json", "deep_objects"), ("hang/one/rank_00000.txt", "empty"),
    ("skipped_samples.json", "deep_lists"),
]  # fmt: skip


def damages() -> list[tuple[str, str]]:
    pairs = list(itertools.product(PIECES, JUNK_KINDS))
    random.Random(20).shuffle(pairs)
    return [*FOUND, *(pair for pair in pairs if pair not in FOUND)]


def shown(failures: list[str]) -> str:
    return f"{len(failures)} failures\n" + "\n\n".join(failures)


@pytest.mark.parametrize(
    "pairs", [damages()[:6], pytest.param(damages()[6:], marks=pytest.mark.slow)], ids=["6", "all"]
)
def test_damaged_run_folders(pairs, tmp_path):
    other, failures = whole_run(tmp_path / "other"), []
    for number, (piece, kind) in enumerate(pairs):
        run = whole_run(tmp_path / f"run{number}")
        spoil(run / piece, kind)
        failures += check(readers(run, other), f"{piece} is {kind}")
        shutil.rmtree(run)
    assert not failures, shown(failures)


@pytest.mark.parametrize("name", [b"caf\xe9", "line\nbreak\x1b[2J[red]a", " ", "-x%s{}*"], ids=repr)
def test_run_folders_of_hostile_names(name, tmp_path):
    run, other = whole_run(tmp_path / os.fsdecode(name)), whole_run(tmp_path / "other")
    (run / os.fsdecode(b"caf\xe9.log")).write_text("Xid 79\n")
    (run / "checkpoints" / os.fsdecode(b"iter_caf\xe9")).mkdir()
    failures = check(readers(run, other), "")
    assert not failures, shown(failures)


# Random command lines


def leaves(parser: argparse.ArgumentParser, *names: str) -> list[Any]:
    """The commands that can be run: their words, and their parsers."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    children = [pair for action in groups for pair in action.choices.items()]
    return [leaf for name, child in children for leaf in leaves(child, *names, name)] or [(names, parser)]


def values_of(folder: Path) -> list[str]:
    """What a command line is made of: names of all kinds, and no name at all."""
    whole_run(folder / "run")
    (folder / "texts").mkdir()
    (folder / "texts/a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "settings.csv").write_text("a,b\n1,2\n")
    names = ("run", "run/checkpoints", "run/config.yaml", "texts", "texts/a.jsonl", "settings.csv", "gone")
    paths = [*(folder / name for name in (*names, "gone/x.jsonl")), Path("/dev/null"), Path("/proc")]
    for kind in ("fifo", "socket", "binary", "deep_lists", "empty", "link_to_itself"):
        spoil(folder / f"{kind}.json", kind)
        spoil(folder / f"{kind}.jsonl", kind)
        paths += [folder / f"{kind}.json", folder / f"{kind}.jsonl"]
    numbers = ["0", "1", "-1", "3", "9" * 30, "9" * 5000, "1e308", "nan", "inf", "0.5", "-0"]
    odd = ["", " ", "x", "²", "\n", "\x1b[2J", "\udcff", "a\0b", "x" * 300, "x" * 5000, "%s{}", "~nobody/x"]
    words = ["..", "a=b", "A=1,B=2", "owner/name", "python_stdlib", "cpu", "none", "8GB"]
    return [*map(str, paths), *numbers, *odd, *words]


def drawn_line(rng: random.Random, names: tuple[str, ...], parser: Any, values: list[str]) -> list[str]:
    arguments, flags = [], []
    for action in parser._actions:
        if not action.option_strings:
            count = rng.choice([1, 1, 1, 2]) if action.nargs in ("+", "*") else 1
            arguments += [rng.choice(values) for _ in range(count)]
        elif action.option_strings[-1] not in NOT_GIVEN:
            flags.append(action)
    required = [flag for flag in flags if flag.required and rng.random() < 0.9]
    for flag in [*required, *rng.sample(flags, min(len(flags), rng.choice([0, 1, 1, 2, 4])))]:
        arguments.append(flag.option_strings[-1])
        if flag.nargs != 0:
            chosen = list(map(str, flag.choices)) if flag.choices and rng.random() < 0.7 else values
            arguments[-1] += f"={rng.choice(chosen)}"
    if names[-1] in ONLY_PLANNED:
        arguments.append("--dry-run")
    if rng.random() < 0.05:
        arguments.append(rng.choice(["--no-such-flag", "--", "-", "--=", "-x"]))
    return [*names, *arguments]


@pytest.mark.parametrize(("seed", "count"), [(1, 70), pytest.param(20, 500, marks=pytest.mark.slow)])
def test_random_command_lines(seed, count, tmp_path, corpus):
    rng, values, failures = random.Random(seed), values_of(tmp_path), []
    found = leaves(whole_parser())
    commands = [leaf for leaf in found if leaf[0][0] not in LEFT_OUT and leaf[0] != ("data",)]
    assert len({names for names, _ in commands}) > 25
    for number in range(count):
        chosen = commands[number % len(commands)]
        failures += check([drawn_line(rng, *chosen, values)], f"line {number}")
    assert not failures, shown(failures)


# Inputs of the commands that read what others have made


def texts_with(folder: Path, name: str | bytes, content: bytes = b'{"text": "one"}\n') -> Path:
    """A folder of two good files and one of a name that is hostile."""
    folder.mkdir(parents=True)
    for good in ("a.jsonl", "z.jsonl"):
        (folder / good).write_bytes(b'{"text": "one and two"}\n' * 50)
    path = os.fsencode(folder) + b"/" + os.fsencode(name)
    with open(path, "wb") as file:  # noqa: PTH123 - bytes
        file.write(content)
    return folder


NAMES = (
    b"\xff\xfe.jsonl", b"caf\xe9.jsonl.gz", b"caf\xe9.parquet", "line\nbreak.jsonl", "\x1b[2J.jsonl",
    "[red]a.jsonl", " .jsonl", "%s{}.jsonl", "-rf.jsonl", "*.jsonl", "\u202e.jsonl", "a" * 240 + ".jsonl",
)  # fmt: skip
CONTENTS = {
    "half_gz.jsonl.gz": gzip.compress(b'{"text": "one"}\n' * 999)[:40],
    "no_gz.jsonl.gz": b"no gzip",
    "no_zst.jsonl.zst": b"\x28\xb5\x2f\xfd" + b"\0" * 40,
    "no_parquet.parquet": b"PAR1" + b"\xff" * 90 + b"PAR1",
    "text_is_none.jsonl": b'{"text": null}\n' * 3,
    "text_is_deep.jsonl": b'{"text": ' + b"[" * 9999 + b"]" * 9999 + b"}\n",
    "surrogate.jsonl": b'{"text": "\\ud800"}\n',
    "nul.jsonl": b'{"text": "\\u0000"}\n\0\0\0\n',
    "one_long_line.jsonl": b'{"text": "' + b"x" * 3_000_000,
    "bom.jsonl": b'\xef\xbb\xbf{"text": "one"}\n',
    "crlf.jsonl": b'{"text": "one"}\r\n\r\n{"text": "two"}\r\n',
}


def text_commands(texts: Path, out: Path) -> list[list[str]]:
    tokenize = ["data", "tokenize", "--tokenizer-type", "ByteLevelTokenizer", "--append-eod"]
    text = str(texts)
    return [
        [*tokenize, "--input", text, "--output-prefix", str(out / "tokens")],
        [*tokenize, "--input", text, "--output-prefix", str(out / "planned"), "--dry-run"],
        ["data", "train-tokenizer", text, "--vocab-size", "300", "--out", str(out / "bpe")],
        ["data", "shuffle", text, "--output", str(out / "shuffled"), "--name", "x", "--shards", "2"],
        ["data", "prepare", text, "--data-dir", str(out / "prepared"), "--workers", "1"],
        ["data", "prepare", text, "--data-dir", str(out / "planned"), "--dry-run"],
        ["data", "inspect", text],
        ["data", "verify", text],
    ]


def hub_model(folder: Path) -> Path:
    """config.json and weights as from-hf reads them."""
    tiny_model("mixtral").save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
def test_20_hostile_texts(part, tmp_path):
    """Of each text one command, another from text to text; the slow parts have the rest."""
    failures = []
    for number, name in enumerate([*NAMES, *CONTENTS]):
        texts = texts_with(tmp_path / f"texts{number}", name, CONTENTS.get(name, b'{"text": "one"}\n'))
        commands = text_commands(texts, tmp_path / f"out{number}")
        failures += check(commands[(number + part) % 8 :: 8], f"{name!r}")
    assert not failures, shown(failures)


@pytest.mark.slow
def test_20_texts_of_the_wrong_kind(tmp_path):
    failures = []
    for number, kind in enumerate(JUNK_KINDS):
        texts = texts_with(tmp_path / f"texts{number}", "m.jsonl")
        spoil(texts / "m.jsonl", kind)
        lines = text_commands(texts, tmp_path / f"out{number}")
        failures += check([*lines, *text_commands(texts / "m.jsonl", tmp_path / f"other{number}")], kind)
    assert not failures, shown(failures)


def test_20_hostile_models(tmp_path):
    model, failures = hub_model(tmp_path / "model"), []
    assert answer(["convert", "from-hf", str(model), str(tmp_path / "good")]).code == 0
    files = ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    pairs = random.Random(20).sample([*itertools.product([*files, "tokenizer_config.json"], JUNK_KINDS)], 20)
    for number, (file, kind) in enumerate(pairs):
        source = tmp_path / f"model{number}"
        shutil.copytree(model, source)
        spoil(source / file, kind)
        lines = [["convert", "from-hf", str(source), str(tmp_path / f"out{number}")]]
        tokenize = ["data", "tokenize", "--input", str(tmp_path / "gone.jsonl"), "--output-prefix", "x"]
        lines += [[*tokenize, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(source)]]
        failures += check(lines, f"{file} is {kind}")
    assert not failures, shown(failures)


def test_a_name_that_is_not_utf8_is_named_in_one_line(tmp_path):
    texts = texts_with(tmp_path / "texts", b"caf\xe9.jsonl")
    for argv in text_commands(texts, tmp_path / "out")[:6]:
        found = answer(argv)
        assert (found.code, found.err.count("\n")) == (1, 1), (argv, found.err)
        assert "caf\\xe9.jsonl" in found.err or "caf\\udce9.jsonl" in found.err
        assert "name must be UTF-8. Fix: rename it" in found.err


@pytest.mark.parametrize("argv", ["plan search --config", "data prepare", "generate --prompt a --checkpoint"])
def test_a_home_folder_of_no_user_is_a_path_that_is_not_there(argv):
    found = answer([*argv.split(), "~no_such_user/x"])
    assert found.code in (1, 2) and found.err.count("\n") == 1, found.err
    assert "~no_such_user/x: does not exist" in found.err or "not found" in found.err
