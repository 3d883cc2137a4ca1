"""What the order of samples depends on: it differs where the samples would, and nowhere else."""

import json
import os
import re

import pytest

from helpers.token_files import samples_of, write_distinct
from moe_exp.config import Config
from moe_exp.data.samples.dataset import SampleStream, fingerprint_of
from moe_exp.data.samples.order import SampleOrder, is_same_order, order_changes, order_of_files
from moe_exp.data.tokens.tokenizer import same_fingerprint, tokenizer_fingerprint
from moe_exp.data.tokens.tokens import parse_blend

OLD = {"train_data": "0.7 a 0.3 b", "seq_len": 64, "seed": 1, "train_iters": 10, "gbsz": 8}
CHECKPOINT = "the checkpoint at iteration 6 of runs/x/checkpoints"
FIX = "or set ALLOW_OTHER_DATA=true to continue with other data."
LOST = "so samples would be repeated or missed"


def order(fingerprint="00ff", **settings):
    config = Config(gpus_per_node=1, **(OLD | settings))
    return config, SampleOrder.of(config, fingerprint, "aaaa")


def problems(before, now):
    _, saved = before
    config, current = now
    return [change.problem for change in order_changes(config, current, saved.facts(), CHECKPOINT, 100)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train_iters": 99, "gbsz": 16, "mbsz": 2, "rampup_batch_size": "8 8 80", "num_workers": 3},
        {"train_data": "70 /moved/a.bin 30 b"},
        {"split": "1"},
    ],
)
def test_same_order(settings):
    assert problems(order(), order(**settings)) == []


@pytest.mark.parametrize(
    ("settings", "rule", "fix"),
    [
        ({"fingerprint": "11ee"}, "(fingerprint 11ee instead of 00ff)", "the old files in their old order"),
        ({"train_data": "0.5 a 0.5 b"}, "the blend weights are 1/2 : 1/2 here ", "restore the old weights"),
        ({"split": "90,10"}, "the training part of each file is 0 to 0.9 here ", "restore the old SPLIT"),
        ({"seed": 2}, "has SEED=1", "set SEED=1"),
        ({"seq_len": 32}, "has SEQ_LEN=64", "set SEQ_LEN=64"),
        ({"data_order": "megatron"}, "has DATA_ORDER=stream", "set DATA_ORDER=stream"),
        ({"document_packing": "best_fit"}, "has DOCUMENT_PACKING=concat", "set DOCUMENT_PACKING=concatenate"),
    ],
)
def test_other_order(settings, rule, fix):
    (line,) = problems(order(), order(**settings))
    ((name, value),) = settings.items()
    name, value = ("train_data", OLD["train_data"]) if name == "fingerprint" else (name, value)
    assert line.startswith(f"{name.upper()}={value}: ") and rule in line and CHECKPOINT in line
    assert line.endswith(f"{fix}, {FIX}") and LOST in line


def test_other_tokens_of_the_same_lengths():
    config, before = order()
    saved, now = before.facts(), SampleOrder.of(config, "00ff", "bbbb")
    (change,) = order_changes(config, now, saved, CHECKPOINT, 100)
    assert change.problem.startswith("TRAIN_DATA=0.7 a 0.3 b: its files differ from the data of")
    assert "(content bbbb instead of aaaa), so the loss would jump" in change.problem


@pytest.mark.parametrize("fact", ["content", "packing", "seed", "tokenizer"])
def test_facts_that_an_older_checkpoint_does_not_have(fact):
    saved = {name: value for name, value in order()[1].facts().items() if name != fact}
    other = {"seed": {"seed": 2}, "packing": {"document_packing": "best_fit"}}.get(fact, {})
    config, _ = order(**other)
    now = SampleOrder.of(config, "00ff", "bbbb" if fact == "content" else "aaaa")
    changes = order_changes(config, now, saved, CHECKPOINT, 100)
    # there was no other packing then
    assert [change.fix for change in changes] == ["set DOCUMENT_PACKING=concatenate"] * (fact == "packing")
    assert order_changes(*order(), saved, CHECKPOINT, 100) == []
    assert is_same_order(now.facts(), saved) == (fact != "packing")


def test_other_manifests_where_a_sample_of_the_tokens_is_the_same(tmp_path):
    """One token of a file of gigabytes: `content` may not see it, what has made the files has."""
    write(tmp_path / "a")
    settings = {"train_data": str(tmp_path / "a"), "data_order": "stream"}
    manifest = tmp_path / "a.manifest.json"
    without = order(**settings)
    orders = []
    for digest in ("11", "22"):
        hashes = [{"name": f"a{suffix}", "bytes": 1, "hash": digest} for suffix in (".bin", ".idx")]
        manifest.write_text(json.dumps({"outputs": hashes, "made_at": digest}))
        orders.append(order(**settings))
    (line,) = problems(*orders)
    before, now = (one.manifest for _, one in orders)
    assert f"the file hashes in its manifests differ from those in {CHECKPOINT}" in line
    assert f"(manifest {now} instead of {before})" in line and "moe-exp data verify" in line
    assert not is_same_order(orders[0][1].facts(), orders[1][1].facts())
    assert without[1].manifest is None
    for now in orders:  # where one has none, they are not compared; nor is the time of the file
        assert problems(without, now) == problems(now, without) == []
    os.utime(manifest, (1, 1))
    assert problems(orders[1], order(**settings)) == []
    for index in range(2):  # a change of one file is enough
        changed = [*hashes[:index], hashes[index] | {"hash": "33"}, *hashes[index + 1 :]]
        manifest.write_text(json.dumps({"outputs": changed}))
        assert order(**settings)[1].manifest != orders[1][1].manifest


def test_every_difference_is_named():
    lines = problems(order(), order("11ee", seed=2, split="90,10"))
    assert [line.partition("=")[0] for line in lines] == ["TRAIN_DATA", "SPLIT", "SEED"]


def test_embedded_corpus_of_another_python():
    (line,) = problems(order(train_data=""), order("11ee", train_data=""))
    assert line.startswith(f"TRAIN_DATA=: its files differ from the data of {CHECKPOINT} (")
    assert "Fix: use the versions of Python, PyTorch and moe_exp that created the embedded corpus" in line


def test_megatrons_order_and_the_number_of_samples():
    old = order(data_order="megatron")
    assert problems(old, order(data_order="megatron", train_iters=5, gbsz=16)) == []
    (line,) = problems(old, order(data_order="megatron", train_iters=20))
    assert line.startswith("TRAIN_ITERS=20: with DATA_ORDER=megatron the order depends on ")
    assert line.endswith(f"Fix: set TRAIN_ITERS and GBSZ so that their product is 80, {FIX}")


def write(prefix, first_id=1):
    return write_distinct(prefix, [20] * 100, first_id)


def test_same_order_has_the_same_samples(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", first_id=5000)
    orders, samples = [], []
    for text in (f"0.7 {a} 0.3 {b}", f"70 {a}.bin 30 {b}", f"0.5 {a} 0.5 {b}"):
        config = Config(gpus_per_node=1, **(OLD | {"train_data": text, "seq_len": 8}))
        orders.append(order_of_files(config))
        samples.append(SampleStream(parse_blend(text), seq_len=8, seed=1).batch(0, 200))
    assert orders[0] == orders[1] != orders[2]
    assert samples[0].equal(samples[1]) and not samples[0].equal(samples[2])
    assert orders[0].fingerprint == fingerprint_of([a, b]) != fingerprint_of([b, a])


def test_megatrons_order_is_another_one_for_more_samples(tmp_path):
    """Why the number of samples is part of it."""
    prefix = write(tmp_path / "a")
    few, many = (samples_of("megatron", prefix, 8, count, tmp_path).batch(0, 200) for count in (200, 900))
    assert not few.equal(many)


BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
ADDED = {"id": 3, "content": "<end>", "special": True}


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"padding": {"length": 8}, "truncation": {"max_length": 8}}, True),
        ({"post_processor": {"type": "ByteLevel"}, "decoder": {"type": "ByteLevel"}}, True),
        ({"added_tokens": [ADDED | {"special": False}]}, True),
        ({"model": BPE | {"vocab": {"b": 1, "ab": 2, "a": 0}, "merges": [["a", "b"]]}}, True),
        ({"model": BPE | {"dropout": 0.1, "unk_token": None, "ignore_merges": False}}, True),
        ({"model": BPE | {"unk_id": 0}}, False),
        ({"model": BPE | {"vocab": {"a": 1, "b": 0, "ab": 2}}}, False),
        ({"model": BPE | {"merges": []}}, False),
        ({"normalizer": {"type": "NFC"}}, False),
        ({"pre_tokenizer": {"type": "Whitespace"}}, False),
        ({"added_tokens": [ADDED | {"id": 4}]}, False),
        ({"added_tokens": [ADDED | {"content": "<stop>"}]}, False),
    ],
)
def test_fingerprints_compare_what_makes_ids(change, is_same, tmp_path):
    content, path = {"model": BPE, "added_tokens": [ADDED]}, tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    first = tokenizer_fingerprint(path)
    # what versions before it recorded of the same file
    assert same_fingerprint(first, "bbb851ca36f13526") and not same_fingerprint(first, "bbb851ca36f13527")
    path.write_text(json.dumps(content | change, indent=3))
    assert same_fingerprint(first, tokenizer_fingerprint(path)) == is_same


def test_tokenizer_is_compared_where_both_are_known(tmp_path):
    def tokenizer(name, vocab, **other):
        path = tmp_path / name / "tokenizer.json"
        path.parent.mkdir()
        model = {"type": "BPE", "vocab": vocab, "merges": []}
        path.write_text(json.dumps({"model": model, "added_tokens": [], **other}))
        return {"tokenizer": str(path.parent)}

    first = tokenizer("first", {"a": 0, "b": 1})
    same = tokenizer("same", {"b": 1, "a": 0}, padding={"length": 8})
    other = tokenizer("other", {"a": 1, "b": 0})
    for before, now in ((first, same), (first, {}), ({}, first)):
        assert problems(order(**before), order(**now)) == []
    (line,) = problems(order(**first), order(**other))
    rule = rf"is not the tokenizer of {CHECKPOINT} \(fingerprint \w{{32}} instead of \w{{32}}\)"
    assert re.match(rf"TOKENIZER=\S+other: {rule}, so token ids would have another meaning", line)
