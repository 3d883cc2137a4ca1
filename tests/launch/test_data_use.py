"""What a start says about the use of its token files: repeated sources, validation on one document."""

import json
import logging
import re
from pathlib import Path

import pytest

from helpers.jsonl import BinIdxWriter
from moe_exp.config import Config, load_config
from moe_exp.data.shuffle.shuffle import shuffle_documents
from moe_exp.launch.launch import train
from moe_exp.launch.source_checks import data_warnings


def write_tokens(prefix: Path, num_documents: int) -> str:
    """Documents of 10 tokens."""
    with BinIdxWriter(prefix, vocab_size=4096) as writer:
        for _ in range(num_documents):
            writer.add_document([1] * 9)
    return str(prefix)


SIZES = {"preset": "cpu", "seq_len": 10, "gbsz": 10, "mbsz": 1, "eval_interval": 0}


def run_of(num_tokens: int, **settings: object) -> Config:
    """A run of samples of 10 tokens."""
    return load_config(SIZES | {"train_iters": num_tokens // 100} | settings, {})


@pytest.fixture
def places(tmp_path):
    """Token files of 1,000 and 100 tokens, as `moe-exp data mix` has them."""
    return write_tokens(tmp_path / "a", 100), write_tokens(tmp_path / "b", 10)


@pytest.mark.parametrize(
    ("train_data", "num_tokens", "settings", "epochs"),
    [
        ("0.9 {a} 0.1 {b}", 1000, {}, {}),  # 0.9 and 1.0 times
        ("0.5 {a} 0.5 {b}", 1000, {}, {"b": 5.0}),
        ("5 {a} 5 {b}", 1000, {}, {"b": 5.0}),  # weights are relative
        ("{a} {b}", 2200, {}, {"a": 2.0, "b": 2.0}),  # weighted by size
        ("0.9 {a} 0.1 {b}", 2000, {}, {"a": 1.8, "b": 2.0}),
        ("{a}", 4000, {}, {}),  # up to four times, repeated data is as good as new
        ("{a}", 5000, {}, {"a": 5.0}),
        ("{a}", 3000, {"split": "50,50"}, {"a": 6.0}),
        ("{a}", 3000, {"rampup_batch_size": "5 5 1000"}, {}),
        ("{a}", 4000, {"data_stages": '[{"from_tokens": 1000, "train_data": "BLEND"}]'},
         {"b": 15.0, "a": 2.5}),
        ("0.5 {a} 0.5 {b}", 1000, {"data_order": "megatron"}, {"b": 5.0}),
    ],
)  # fmt: skip
def test_sources_that_are_read_too_often(train_data, num_tokens, settings, epochs, places):
    a, b = places
    if "data_stages" in settings:
        settings = settings | {"data_stages": settings["data_stages"].replace("BLEND", f"0.5 {a} 0.5 {b}")}
    lines = data_warnings(run_of(num_tokens, train_data=train_data.format(a=a, b=b), **settings))
    matches = [re.match(r"TRAIN_DATA=(\S+): this run reads it ([\d.]+) times\. Fix: ", one) for one in lines]
    found = {Path(match[1]).name: float(match[2]) for match in matches}
    assert found == pytest.approx(epochs, rel=1e-2)


def test_a_mixture_says_how_often_a_source_may_be_read(places, tmp_path):
    a, b = places
    sources = [{"max_epochs": None}, {"max_epochs": 3}]
    facts = {"train_data": "0.5 old/a 0.5 old/b", "settings": {"sources": sources}}
    (tmp_path / "mixture.json").write_text(json.dumps(facts))
    assert data_warnings(run_of(600, train_data=f"0.5 {a} 0.5 {b}")) == []
    (line,) = data_warnings(run_of(1000, train_data=f"0.5 {a} 0.5 {b}"))
    assert re.match(rf"TRAIN_DATA={b}: .* 5\.00 times, .* max_epochs=3.* total_tokens=1000\.", line)


@pytest.mark.parametrize("facts", [
    "[]", '{"train_data": 5}', '{"settings": {"sources": []}}',
    '{"train_data": "1 a", "settings": {"sources": [3]}}',
    '{"train_data": "1 a", "settings": {"sources": [{"max_epochs": "many"}]}}',
])  # fmt: skip
def test_mixture_json_of_another_program(facts, places, tmp_path):
    (tmp_path / "mixture.json").write_text(facts)
    (line,) = data_warnings(run_of(5000, train_data=places[0]))
    assert line.startswith(f"TRAIN_DATA={places[0]}: this run reads it 5.00 times. Fix: ")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"valid_data": "{a}"}, ""),
        ({"valid_data": "1 {a} 1 {one}"}, "VALID_DATA={one}: has only one document: the"),
        ({"valid_data": "{one}", "eval_interval": 0}, ""),
        ({"split": "95,5"}, ""),
        ({"split": "99,1"}, "TRAIN_DATA={a}: has only one document for validation with SPLIT=99,1: the"),
    ],
)
def test_validation_on_one_document(settings, name, places, tmp_path):
    one = write_tokens(tmp_path / "one", 1)
    given = {key: str(text).format(a=places[0], one=one) for key, text in settings.items()}
    lines = data_warnings(run_of(100, train_data=places[0], **({"eval_interval": 10} | given)))
    expected = [name.format(a=places[0], one=one)] if name else []
    assert [line.partition(" loss on")[0] for line in lines] == expected


def test_a_dry_run_warns(places, tmp_path, capsys):
    given = SIZES | {"train_iters": 10, "train_data": f"0.5 {places[0]} 0.5 {places[1]}"}
    assert train(given | {"run_dir": str(tmp_path)}, dry_run=True) == 0
    assert f"warning: TRAIN_DATA={places[1]}: this run reads it 5.00 times." in capsys.readouterr().err


@pytest.mark.parametrize(("valid_fraction", "is_one"), [(0.05, True), (0.25, False)])
def test_a_shuffle_that_holds_out_one_document(valid_fraction, is_one, tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(20)))
    with caplog.at_level(logging.WARNING):
        rules = {"num_shards": 1, "valid_fraction": valid_fraction}
        made = shuffle_documents([path], tmp_path / "out", name="x", **rules)
    assert (made["valid"]["num_documents"] == 1) == is_one
    assert ["x: only 1 of 20 documents is held out" in line for line in caplog.messages] == [True] * is_one
