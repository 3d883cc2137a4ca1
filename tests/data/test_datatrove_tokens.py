"""datatrove's tokenizer, fed by our reader and merged: the bytes of our own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from moe_exp.commands.data_commands import main
from moe_exp.data.datatrove_tokens import tokenize_by_datatrove
from moe_exp.data.documents import BadDocument
from moe_exp.data.preprocess import tokenize_files
from moe_exp.data.token_parts import PartSettings
from moe_exp.data.tokenizer import load_tokenizer
from moe_exp.data.tokenizer_training import EOD_TOKEN, train_bpe

TEXTS = [f"def f{i}(x):\n    return x + {i}  # {EOD_TOKEN} 世界\u2028" for i in range(30)]


@pytest.fixture
def how(tmp_path):
    train_bpe(TEXTS, 300).save(str(tmp_path / "tokenizer.json"))
    return PartSettings(load_tokenizer("HuggingFaceTokenizer", model=tmp_path), append_eod=True)


@pytest.fixture
def inputs(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl"]
    for index, path in enumerate(paths):
        content = "\n".join(json.dumps({"text": text}) for text in TEXTS[index * 10 : index * 10 + 10]).encode() + b"\n\n"
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return paths


def contents(prefix):
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("tasks", [1, 2])
def test_bytes_are_ours(tasks, how, inputs, tmp_path):
    tokenize_files(inputs, tmp_path / "ours", how)
    manifest = tokenize_by_datatrove(inputs, tmp_path / "theirs", how, executor="local", tasks=tasks)
    assert contents(tmp_path / "theirs") == contents(tmp_path / "ours")
    assert manifest["num_documents"] == 30
    assert tokenize_by_datatrove(inputs, tmp_path / "theirs", how, executor="local", tasks=tasks)["num_documents"] == 30


def test_a_bad_line_stops(how, inputs, tmp_path):
    inputs[2].write_bytes(b'{"text": "a"}\nnot JSON\n')
    with pytest.raises(BadDocument, match=r"c\.jsonl:2: not valid JSON"):
        tokenize_by_datatrove(inputs, tmp_path / "theirs", how, executor="local", tasks=3)
    assert not (tmp_path / "theirs.bin").exists()


def test_the_slurm_script(how, inputs, tmp_path, monkeypatch):
    """Up to sbatch, which is a program that takes the script: what it would run is there."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    lines = ["#!/bin/sh", "for script; do :; done", f'cat "$script" >> {tmp_path}/submitted', "echo Submitted batch job 7"]
    sbatch.write_text("\n".join(lines))
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=":")
    slurm = {"partition": "cpu", "time": "1:00:00"}
    assert tokenize_by_datatrove(inputs, tmp_path / "theirs", how, executor="slurm", tasks=3, workers=2, slurm=slurm) is None
    script = (tmp_path / "submitted").read_text()
    assert "#SBATCH --partition=cpu" in script
    assert "launch_pickled_pipeline" in script
    assert tokenize_by_datatrove(inputs, tmp_path / "theirs", how, executor="slurm", tasks=3, workers=2, slurm=slurm) is None
    assert (tmp_path / "submitted").read_text() == script, "it waits, and submits nothing twice"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"executor": "pbs"}, "EXECUTOR=pbs: must be one of local, slurm, ray"),
        ({"tasks": 4}, "TASKS=4: a task reads whole files, and there are 3. Fix: give 1 to 3"),
        ({"executor": "slurm"}, "SLURM needs a partition and a time limit"),
    ],
)
def test_wrong_settings(change, message, how, inputs, tmp_path):
    with pytest.raises(ValueError, match=message):
        tokenize_by_datatrove(inputs, tmp_path / "out", how, **{"executor": "local", "tasks": 1} | change)
    assert not (tmp_path / "out.datatrove.partial").exists()


def test_command(how, inputs, tmp_path, capsys):
    flags = ["--output-prefix", str(tmp_path / "x"), "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    flags += ["--append-eod", "--executor", "local", "--tasks", "2", "--workers", "1"]
    assert main("tokenize", ["--input", *map(str, inputs), *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"TRAIN_DATA={tmp_path}/x_text_document VOCAB_SIZE={how.tokenizer.vocab_size}"
