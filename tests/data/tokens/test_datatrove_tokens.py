"""Parts made by tasks of datatrove's executors, and joined: the bytes of our own."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from helpers.slurm.cluster import Cluster
from moe_exp.commands.data import main
from moe_exp.commands.guard import UNDER_WAY
from moe_exp.data.kinds import BadDocument
from moe_exp.data.tokens.by_datatrove import tokenize_by_datatrove
from moe_exp.data.tokens.parts import PartSettings
from moe_exp.data.tokens.preprocess import tokenize_files
from moe_exp.data.tokens.tokenizer import load_tokenizer
from moe_exp.data.tokens.tokenizer_training import EOD_TOKEN, train_bpe

TEXTS = [f"def f{i}(x):\n    return x + {i}  # {EOD_TOKEN} 世界\u2028" for i in range(30)]


@pytest.fixture
def how(tmp_path):
    train_bpe(TEXTS, 300).save(str(tmp_path / "tokenizer.json"))
    return PartSettings(load_tokenizer("HuggingFaceTokenizer", model=tmp_path), append_eod=True)


@pytest.fixture
def inputs(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl"]
    for index, path in enumerate(paths):
        content = (
            "\n".join(json.dumps({"text": text}) for text in TEXTS[index * 10 : index * 10 + 10]).encode()
            + b"\n\n"
        )
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
    assert (
        tokenize_by_datatrove(inputs, tmp_path / "theirs", how, executor="local", tasks=tasks)[
            "num_documents"
        ]
        == 30
    )


def test_a_tokenizer_without_a_tokenizer_json(inputs, tmp_path):
    how = PartSettings(load_tokenizer("ByteLevelTokenizer"), append_eod=True)
    tokenize_files(inputs, tmp_path / "ours", how)
    tokenize_by_datatrove(inputs, tmp_path / "theirs", how, executor="local", tasks=2)
    assert contents(tmp_path / "theirs") == contents(tmp_path / "ours")


def test_a_bad_line_stops(how, inputs, tmp_path):
    inputs[2].write_bytes(b'{"text": "a"}\nnot JSON\n')
    with pytest.raises(BadDocument, match=r"c\.jsonl:2: not valid JSON"):
        tokenize_by_datatrove(inputs, tmp_path / "theirs", how, executor="local", tasks=3)
    assert not (tmp_path / "theirs.bin").exists()


UNIGRAM = [[piece, -3.0] for piece in ("<unk>", "</s>", *map(chr, range(32, 127)))]


@pytest.fixture
def reads_end_token(tmp_path):
    """A tokenizer whose model has </s> as a piece: in a text it is the end-of-document token, whatever one
    asks for.
    """
    model = {"type": "Unigram", "unk_id": 0, "vocab": UNIGRAM, "byte_fallback": False}
    folder = tmp_path / "unigram"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return folder


def test_what_is_skipped_is_counted(reads_end_token, tmp_path, capsys):
    paths = [tmp_path / name for name in ("x.jsonl", "blank.jsonl", "y.jsonl")]
    paths[0].write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two </s> three", "four"))
        + "not JSON\n\n"
    )
    paths[1].write_text("\n\n")
    paths[2].write_text('{"text": "five"}\n')
    flags = [
        "--input",
        *map(str, paths),
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(reads_end_token),
    ]
    flags += ["--append-eod", "--backend", "tokenizers", "--workers", "1"]
    datatrove = ["--executor", "local", "--tasks", "3"]
    (tmp_path / "z.jsonl").write_text("\n" + json.dumps({"text": "two </s> three"}))
    stops = [
        "--input",
        str(tmp_path / "z.jsonl"),
        "--executor",
        "local",
        "--output-prefix",
        str(tmp_path / "stops"),
    ]
    assert main("tokenize", [*flags, *stops]) == 1
    assert "z.jsonl:2: the tokenizer reads </s> in the text as a special token" in capsys.readouterr().err
    assert main("tokenize", [*flags, "--skip-bad", "--output-prefix", str(tmp_path / "ours")]) == 0
    assert (
        main("tokenize", [*flags, *datatrove, "--skip-bad", "--output-prefix", str(tmp_path / "theirs")]) == 0
    )
    assert "skipped: not valid JSON" in capsys.readouterr().out
    assert contents(tmp_path / "theirs_text_document") == contents(tmp_path / "ours_text_document")
    ours, theirs = (
        json.loads((tmp_path / f"{name}_text_document.manifest.json").read_text())
        for name in ("ours", "theirs")
    )
    assert theirs["skipped"] == {
        "blank line": 3,
        "not valid JSON": 1,
        "the tokenizer reads </s> in the text as a special token": 1,
    }
    assert (theirs["num_documents"], theirs["num_eods"]) == (3, 3)
    assert main("verify", [str(tmp_path / "theirs_text_document")]) == 0
    same = ("num_documents", "num_tokens", "num_eods", "num_text_bytes", "text_hash", "skipped", "dtype")
    assert {name: theirs[name] for name in same} == {name: ours[name] for name in same}


def test_inputs_without_documents(how, inputs, tmp_path):
    for path in inputs:
        path.write_bytes(gzip.compress(b"\n") if path.suffix == ".gz" else b"\n")
    with pytest.raises(ValueError, match="the inputs have no documents"):
        tokenize_by_datatrove(inputs, tmp_path / "theirs", how, executor="local", tasks=2)


def without_last_document(part):
    """A task's files as of one document less, sound in themselves."""
    lengths = np.fromfile(f"{part}.lengths", np.int32)[:-1]
    lengths.tofile(f"{part}.lengths")
    os.truncate(f"{part}.bin", 2 * int(lengths.sum()))


def with_a_shorter_list_of_documents(part):
    os.truncate(f"{part}.lengths", 4 * 9)


def with_an_end_token_more(part):
    tokens = np.fromfile(f"{part}.bin", np.uint16)
    tokens[1] = 0
    tokens.tofile(f"{part}.bin")


def with_another_token(part):
    tokens = np.fromfile(f"{part}.bin", np.uint16)
    tokens[1] ^= 1
    tokens.tofile(f"{part}.bin")


DAMAGE = [without_last_document, with_an_end_token_more, with_another_token]


def test_slurm_from_the_command_to_the_files(how, inputs, tmp_path, monkeypatch, capsys):
    cluster = Cluster(tmp_path / "queue")
    monkeypatch.setenv("PATH", f"{cluster.programs}:{os.environ['PATH']}")
    flags = [
        "--input",
        *map(str, inputs),
        "--output-prefix",
        str(tmp_path / "x"),
        "--tokenizer-type",
        "HuggingFaceTokenizer",
    ]
    flags += ["--tokenizer-model", str(tmp_path), "--append-eod", "--workers", "2"]
    flags += ["--executor", "slurm", "--tasks", "3", "--slurm-partition", "cpu", "--slurm-time", "1:00:00"]
    jobs = []
    for _ in range(2):
        assert main("tokenize", flags) == UNDER_WAY
        assert capsys.readouterr().out.startswith(f"{tmp_path}/x_text_document: SLURM jobs are under way")
        jobs.append(cluster.jobs())
    assert jobs[0] == jobs[1], "it waits, and submits nothing twice"
    cluster.run()
    part = tmp_path / "x_text_document.partial" / "part.000001"
    for damage in DAMAGE:
        damage(part)
        assert main("tokenize", flags) == 1
        assert f"{part}.bin: is not what was written" in capsys.readouterr().err
        assert not (tmp_path / "x_text_document.bin").exists()
        assert main("tokenize", flags) == UNDER_WAY, "the part is made again"
        assert len(cluster.jobs()) > len(jobs[0])
        jobs = [cluster.jobs()]
        cluster.run()
    with_a_shorter_list_of_documents(tmp_path / "x_text_document.partial" / "part.000002")
    assert main("tokenize", flags) == 1
    assert "29 documents instead of 30" in capsys.readouterr().err
    assert not (tmp_path / "x_text_document.bin").exists()
    assert main("tokenize", [*flags, "--start-over"]) == UNDER_WAY
    cluster.run()
    assert main("tokenize", flags) == 0, [path.read_text() for path in cluster.folder.glob("*.out")]
    tokenize_files(inputs, tmp_path / "ours", how)
    assert contents(tmp_path / "x_text_document") == contents(tmp_path / "ours")
    assert main("verify", [str(tmp_path / "x_text_document")]) == 0


def test_the_slurm_script(how, inputs, tmp_path, monkeypatch):
    """Up to sbatch, which is a program that takes the script: what it would run is there."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    lines = [
        "#!/bin/sh",
        "for script; do :; done",
        f'cat "$script" >> {tmp_path}/submitted',
        "echo Submitted batch job 7",
    ]
    sbatch.write_text("\n".join(lines))
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=":")
    slurm = {"partition": "cpu", "time": "1:00:00"}
    assert (
        tokenize_by_datatrove(
            inputs, tmp_path / "theirs", how, executor="slurm", tasks=3, workers=2, slurm=slurm
        )
        is None
    )
    script = (tmp_path / "submitted").read_text()
    assert "#SBATCH --partition=cpu" in script
    assert "launch_pickled_pipeline" in script
    assert (
        tokenize_by_datatrove(
            inputs, tmp_path / "theirs", how, executor="slurm", tasks=3, workers=2, slurm=slurm
        )
        is None
    )
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
    flags = [
        "--output-prefix",
        str(tmp_path / "x"),
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(tmp_path),
    ]
    flags += ["--append-eod", "--executor", "local", "--tasks", "2", "--workers", "1"]
    assert main("tokenize", ["--input", *map(str, inputs), *flags]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"TRAIN_DATA={tmp_path}/x_text_document VOCAB_SIZE={how.tokenizer.vocab_size}"
    )
