"""`moe-exp generate` as a user calls it, and all commands under torchrun."""

import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.hf.hf_checkpoint import SEQ_LEN, VOCAB, tiny_model, write_checkpoint
from helpers.jsonl import BinIdxWriter
from helpers.whole_runs import ROOT, clean_environ
from moe_exp import cli
from moe_exp.engine.runtime import Runtime
from moe_exp.inference.generate import Generated, GenerateRequest, plan_generation
from moe_exp.inference.generate import generate as generate_texts
from moe_exp.inference.ranks import Stage, load_model, run_alone


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tiny_model("mixtral"), tmp_path_factory.mktemp("mixtral") / "iter_0000000")


def generate(checkpoint: Path, *flags: str) -> int:
    return cli.main(["generate", "--checkpoint", str(checkpoint), "--threads-per-rank", "1", *flags])


def objects(printed: str) -> list[dict]:
    return [json.loads(line) for line in printed.splitlines()]


def test_text_and_json(checkpoint, capsys, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("né", encoding="utf-8")
    prompts = ["--prompt", "abc", "--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "12"]
    assert generate(checkpoint, *prompts, "--json") == 0
    first, second = objects(capsys.readouterr().out)
    assert (first["prompt"], first["prompt_tokens"]) == ("abc", [97, 98, 99])
    assert (second["prompt"], second["prompt_tokens"]) == ("né", list("né".encode()))
    for result in (first, second):
        assert len(result["tokens"]) == len(result["logprobs"]) == 12
        assert all(log_prob < 0 for log_prob in result["logprobs"])
        assert result["finish_reason"] == "length"
        assert result["text"] == bytes(result["tokens"]).decode(errors="replace")
    assert generate(checkpoint, *prompts) == 0
    assert capsys.readouterr().out == f"{first['text']}\n\n{second['text']}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert generate(checkpoint, *prompts) == 0
    assert capsys.readouterr().out == f"abc{first['text']}\nné{second['text']}\n"


def test_drawing_is_repeatable(checkpoint, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        flags = f"--temperature 1 --top-k 40 --top-p 0.95 --seed {seed} --max-new-tokens 16"
        assert generate(checkpoint, "--prompt", "abc", "--json", *flags.split()) == 0
        texts.append(objects(capsys.readouterr().out)[0]["tokens"])
    assert texts[0] == texts[1] != texts[2]
    same = ["--prompt", "abc", "--prompt", "abc", "--json", "--temperature", "1", "--max-new-tokens", "16"]
    assert generate(checkpoint, *same) == 0
    first, second = objects(capsys.readouterr().out)
    assert first["tokens"] != second["tokens"]  # each prompt draws by itself


def test_ends(checkpoint, capsys):
    """At a stop text, at the last position, and at the end-of-document token."""
    assert generate(checkpoint, "--prompt", "abc", "--json") == 0
    (whole,) = objects(capsys.readouterr().out)
    assert len(whole["prompt_tokens"] + whole["tokens"]) == SEQ_LEN
    stop = whole["text"][5:7]
    assert generate(checkpoint, "--prompt", "abc", "--json", "--stop", stop) == 0
    (stopped,) = objects(capsys.readouterr().out)
    assert (stopped["text"], stopped["finish_reason"]) == (whole["text"][: whole["text"].index(stop)], "stop")
    plan, end = plan_generation(GenerateRequest(str(checkpoint), ("abc",))), whole["tokens"][9]
    results: list[Generated] = []
    ending = replace(plan, tokenizer=replace(plan.tokenizer, eod_id=end))

    def work(rank: Runtime) -> None:
        stage = Stage(plan.config, rank, load_model(plan.config, rank, plan.folder))
        results.extend(generate_texts(ending, stage))

    run_alone(plan.config, work)
    assert results[0].tokens == whole["tokens"][: whole["tokens"].index(end) + 1]
    assert (results[0].finish_reason, len(results[0].logprobs)) == ("end_of_document", len(results[0].tokens))
    assert results[0].text == bytes(results[0].tokens[:-1]).decode(errors="replace")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("", "PROMPT=: must be given. Fix: use --prompt TEXT or --prompt-file FILE."),
        ("--prompt=", "PROMPT='': must have at least one token. Fix: "),
        (f"--prompt {'x' * SEQ_LEN}", f"tokens, but must have fewer than max_positions={SEQ_LEN}"),
        ("--prompt x --max-new-tokens 0", "MAX_NEW_TOKENS=0: must be at least 1. Fix: "),
        ("--prompt x --ep 8", "EP=8: must divide NUM_EXPERTS=4. Fix: "),
        ("--prompt x --nnodes two", "NNODES=two: must be a whole number. Fix: "),
        ("--prompt x --tokenizer nowhere", "TOKENIZER=nowhere: does not exist. Fix: "),
        ("--prompt-file prompt", "is not UTF-8 (invalid start byte at byte 2). Fix: "),
        ("--prompt-file none", "cannot be read (No such file or directory). Fix: "),
    ],
    ids=lambda value: "",
)
def test_bad_input(checkpoint, capsys, flags, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    assert generate(checkpoint, *flags.split()) == 1
    printed = capsys.readouterr()
    assert line in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.slow
def test_under_torchrun(checkpoint, tmp_path):
    """The whole commands on two ranks: the same file, the same loss and the same text as on one."""
    with BinIdxWriter(tmp_path / "held_out", vocab_size=VOCAB, eod_id=256) as writer:
        writer.add_document(list(b"a text" * 40))
    np.save(tmp_path / "ids.npy", np.random.default_rng(5).integers(0, VOCAB, (3, 9)))
    logits, outputs = [], defaultdict(list)
    for layout in (["--tp", "1"], ["--ep", "2"], ["--pp", "2"]):
        common = ["--checkpoint", str(checkpoint), *layout]
        flags = {
            "score": ["--tokens", "ids.npy", "--out", "logits.npy", "--overwrite"],
            "eval": ["--data", "held_out", "--experts", "--json"],
            "generate": ["--prompt", "abc", "--prompt", "üx", "--temperature", "0.9"],
        }
        for command, options in flags.items():
            line = [sys.executable, "-m", "moe_exp", command, *common, *options]
            environ = clean_environ(PYTHONPATH=ROOT)
            streams = {"capture_output": True, "encoding": "utf-8"}
            ended = subprocess.run(line, env=environ, cwd=tmp_path, timeout=240, **streams)
            assert ended.returncode == 0, ended.stderr
            outputs[command].append(ended.stdout)
        logits.append(np.load(tmp_path / "logits.npy"))
    (text,) = set(outputs["generate"])
    assert len(text) > 50
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], rtol=0, atol=1e-5)
    alone, *others = map(json.loads, outputs["eval"])
    for result in others:
        bits = alone["total"]["bits_per_byte"]
        assert result["total"]["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
        assert result["total"]["tokens"] == 6 * 40
        sums = [sum(layer["tokens_per_expert"]["held_out"]) for layer in result["experts"]]
        assert sums == [2 * 6 * 40] * 2
