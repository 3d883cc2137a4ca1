"""VOCAB_SIZE by the data, if it is not given."""

import json
from pathlib import Path

import pytest

from moe_exp.config import Config, load_config, to_yaml
from moe_exp.data.tokens.manifests import with_vocab_size
from moe_exp.launch.launch import train
from moe_exp.studies.child_runs import given_settings


def tokens(name: str, size: int | None) -> str:
    """A prefix whose manifest has this vocabulary."""
    manifest = {"settings": {"tokenizer": {"vocab_size": size}}} if size else {}
    Path(f"{name}.manifest.json").write_text(json.dumps(manifest))
    return name


def tokenizer(size: int) -> str:
    vocab = {f"t{index}": index for index in range(size)}
    Path("tok").mkdir()
    Path("tok/tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    return "tok"


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in Config.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def resolved(recorded: Path | None = None, **given: str) -> tuple[int, str]:
    config, reason = with_vocab_size(load_config({"preset": "cpu"} | given, {}), given, recorded)
    return config.vocab_size, reason


def test_data_and_tokenizer():
    a, b, other = tokens("a", 1000), tokens("b", 1280), tokens("other", None)
    assert resolved() == (2048, "")
    assert resolved(train_data=a) == (1000, "vocabulary of a, 1024 with padding")
    assert resolved(train_data=f"0.5 {a} 0.5 {b}") == (1280, "vocabulary of b")
    assert resolved(train_data=a, valid_data=b) == (1280, "vocabulary of b")
    assert resolved(train_data=f"1 {a} 1 {other}") == (2048, "")
    assert resolved(train_data=a, vocab_size="900") == (900, "")
    assert resolved(train_data="missing") == (2048, "")
    tok = tokenizer(1100)
    assert resolved(train_data=other, tokenizer=tok) == (1100, "vocabulary of tok, 1152 with padding")
    assert resolved(train_data=b, tokenizer=tok) == (1280, "vocabulary of b")
    assert resolved(tokenizer=tok) == (2048, "vocabulary of the embedded corpus")
    assert resolved(train_data=a, tokenizer="missing") == (2048, "")


def test_a_run_that_resumes_keeps_its_own():
    path, a = Path("config.yaml"), tokens("a", 1000)
    assert resolved(path, train_data=a)[0] == 1000
    path.write_text(to_yaml(load_config({"preset": "cpu", "vocab_size": 2000}, {})))
    assert resolved(path, train_data=a) == (2000, "recorded in config.yaml, 2048 with padding")
    assert resolved(path, train_data=a, vocab_size="900") == (900, "")
    path.write_text("[")
    assert resolved(path, train_data=a)[0] == 1000


def test_launcher_and_studies_use_it(capsys):
    flags = {"preset": "cpu", "gpus_per_node": "1", "train_data": tokens("a", 1000), "split": "9,1"}
    assert train(flags, dry_run=True) == 2  # there are no tokens
    out = capsys.readouterr().out
    assert "VOCAB_SIZE=1000                   # vocabulary of a, 1024 with padding\n" in out
    assert " --vocab-size=1000 " in out
    assert given_settings(flags, {})["vocab_size"] == 1000
    assert "vocab_size" not in given_settings({"preset": "cpu"}, {})
