"""A mixture: its settings, weights with a limit of epochs, and everything that one command makes of it."""

import json
import re

import pytest

from helpers.jsonl import read_texts, write_jsonl
from moe_exp.commands.data import main
from moe_exp.data.mixture import MixedSource, Mixing, Mixture, effective_weights, read_mixture
from moe_exp.data.prepare import Preparation, raw_folder
from moe_exp.data.tokens.tokens import TokenFiles

pytest.importorskip("datatrove")


@pytest.mark.parametrize(
    ("weights", "tokens", "epochs", "total", "expected"),
    [
        ([7, 3], [10, 10], [None, None], None, [0.7, 0.3]),
        ([0.5, 0.5], [100, 10], [None, 2], 100, [0.8, 0.2]),
        # what the second gives up makes the third reach its limit, too
        ([0.2, 0.4, 0.4], [1000, 10, 10], [None, 1, 4.5], 100, [0.45, 0.1, 0.45]),
        ([0.5, 0.5], [60, 40], [1, 1], 100, [0.6, 0.4]),
        ([1], [5], [None], 100, [1]),
        ([0.9, 0.1], [100, 100], [1, 1], 100, [0.9, 0.1]),
    ],
)
def test_weights_with_limits(weights, tokens, epochs, total, expected):
    assert effective_weights(weights, tokens, epochs, total) == pytest.approx(expected)


def test_sources_that_are_too_few():
    with pytest.raises(ValueError, match=r"total_tokens=100: max_epochs limits the sources to 70. Fix: "):
        effective_weights([1, 1], [30, 40], [1, 1], 100)


SOURCE = "{tokenizer: x, sources: [{source: a, %s}]}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"must contain settings with a list of sources"),
        ("{tokenizer: x}", r"sources: is missing"),
        ("{tokenizer: x, sources: []}", r"sources=\[\]: List should have at least 1 item"),
        (
            "{sources: [{source: a, weight: 1}]}",
            r"settings: requires either tokenizer or vocab_size, not both",
        ),
        ("{tokenizer: x, sources: [{source: a}]}", r"sources\.0\.weight: is missing"),
        (SOURCE % "weight: 0", r"sources\.0\.weight=0: must be greater than 0"),
        (SOURCE % "weight: 1, heft: 2", r"sources\.0\.heft=2: is not a setting"),
        (SOURCE % "weight: 1, name: a/b", r"sources\.0\.name=a/b: must consist of letters"),
        (SOURCE % "weight: 1, max_epochs: 2", r"settings: max_epochs requires total_tokens"),
    ],
)
def test_settings_that_are_wrong_are_named(tmp_path, text, message):
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"m\.yaml: {message}.* Fix: "):
        read_mixture(tmp_path / "m.yaml")


def write_sources(folder):
    """Two sources, of which one text is in both."""
    for name, count in (("web", 300), ("books", 60)):
        texts = [f"This is document {number} of the {name}, " + "and so on " * 9 for number in range(count)]
        texts += ["A text that both have, with a few words.", "short"]
        texts += [f"Write to me{name}@home.org and you will have an answer."]
        write_jsonl(folder / name / "a.jsonl", [{"text": text} for text in texts])


MIX = ["mine.yaml", "--workers", "1"]
MIXTURE = """
vocab_size: 400
total_tokens: 50_000
num_shards: 2
valid_fraction: 0.05
sources:
  - {source: web, weight: 0.25, filters: [pii], min_chars: 10}
  - {source: books, weight: 0.75, max_epochs: 2, dedup: true, min_chars: 10}
"""


@pytest.fixture
def mixture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    (tmp_path / "mine.yaml").write_text(MIXTURE)
    return tmp_path


def test_from_sources_to_weighted_token_files(mixture, capsys, caplog):
    assert main("mix", [*MIX, "--dry-run"]) == 0
    assert "To prepare: books" in capsys.readouterr().out and not (mixture / "data").exists()
    assert main("mix", MIX) == 0
    out = capsys.readouterr().out
    folder = mixture / "data/mine"
    facts = json.loads((folder / "mixture.json").read_text())
    assert f"TRAIN_DATA='{facts['train_data']}' VALID_DATA='{facts['valid_data']}' VOCAB_SIZE=400" in out
    words = facts["train_data"].split()
    weights, prefixes = [float(word) for word in words[::2]], words[1::2]
    assert prefixes == ["data/mine/web_text_document", "data/mine/books_text_document"]
    tokens = [int(TokenFiles(mixture / prefix).sequence_bounds[-1]) for prefix in prefixes]
    assert weights[1] == pytest.approx(2 * tokens[1] / 50_000, rel=1e-5) and sum(weights) == pytest.approx(1)
    sheet = (folder / "datasheet.md").read_text()
    epochs = weights[0] * 50_000 / tokens[0]  # books has max_epochs
    assert [one for one in caplog.messages if "max_epochs is not set" in one] == [
        f"web: read for {epochs:.2f} epochs with total_tokens=5e+04; max_epochs is not set"
    ]
    row = next(line for line in sheet.splitlines() if line.startswith("| books |"))
    assert row.endswith(f"| {tokens[1]:,} | 75.00% | {weights[1]:.2%} | 2.00 |")
    assert "| removed: length | 1 | 5 bytes |" in sheet and "| edited: pii | 1 |" in sheet
    overlap = next(line for line in reversed(sheet.splitlines()) if line.startswith("| web | ("))
    shared = int(re.fullmatch(r"\| web \| \(\d+\) \| (\d+) \|", overlap)[1])
    paths = [(mixture / f"data/mine_{name}_shuffled").glob("*.chunk.*.jsonl") for name in ("web", "books")]
    assert shared == len(set(read_texts(*paths[0])) & set(read_texts(*paths[1])))
    # called again, it makes nothing
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
    assert main("mix", MIX) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.bin")} == before
    # other weights alone: the files stay
    (mixture / "mine.yaml").write_text(MIXTURE.replace("max_epochs: 2", "max_epochs: 1"))
    assert main("mix", MIX) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.bin")} == before
    again = json.loads((folder / "mixture.json").read_text())["train_data"].split()
    assert float(again[2]) == pytest.approx(weights[1] / 2, rel=1e-4)


def test_a_start_over_that_was_killed_continues_without_the_flag(mixture, monkeypatch):
    assert main("mix", MIX) == 0
    (mixture / "mine.yaml").write_text(MIXTURE.replace("filters: [pii]", "min_score: null, max_chars: 60"))
    for name in ("shuffle_documents", "convert"):  # killed before the shuffle, then before the conversion
        with monkeypatch.context() as patch:
            patch.setattr(f"moe_exp.data.prepare.{name}", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                main("mix", [*MIX, "--start-over"])
    with monkeypatch.context() as patch:
        patch.setattr("moe_exp.data.mixture.tokenize_files", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main("mix", [*MIX, "--start-over"])
    assert main("mix", MIX) == 0
    assert "| removed: length | 301 |" in (mixture / "data/mine/datasheet.md").read_text()
    # another tokenizer repeats the tokenizing alone
    shards = (mixture / "data/mine_web_shuffled/manifest.json").stat().st_mtime_ns
    text = (mixture / "mine.yaml").read_text()
    (mixture / "mine.yaml").write_text(text.replace("vocab_size: 400", "vocab_size: 350"))
    assert main("mix", MIX) == 0
    assert json.loads((mixture / "data/mine/mixture.json").read_text())["vocab_size"] <= 350
    assert (mixture / "data/mine_web_shuffled/manifest.json").stat().st_mtime_ns == shards


def made_at(folder, *names):
    """When the chunks and shards of sources were made."""
    manifests = [f"data/mine_{name}{step}/manifest.json" for name in names for step in ("", "_shuffled")]
    return [(folder / one).stat().st_mtime_ns for one in manifests]


def test_a_change_of_one_source_makes_no_other_again(mixture, capsys):
    path = mixture / "books/a.jsonl"
    path.write_text(path.read_text() + "{broken\n")
    assert main("mix", MIX) == 1
    assert f"{path}:64: not valid JSON. Fix: correct the line, or " in capsys.readouterr().err
    web = made_at(mixture, "web")
    skipping = MIXTURE.replace("max_epochs: 2,", "max_epochs: 2, skip_bad: true,")
    (mixture / "mine.yaml").write_text(skipping)
    assert main("mix", MIX) == 0
    assert made_at(mixture, "web") == web
    assert "| skipped: not valid JSON | 1 |" in (mixture / "data/mine/datasheet.md").read_text()
    # another filter: this source again, if it is asked for
    (mixture / "mine.yaml").write_text(skipping.replace("dedup: true", "max_chars: 60"))
    assert main("mix", MIX) == 1
    assert "Fix: use --start-over-source books to recreate it" in capsys.readouterr().err
    books = made_at(mixture, "books")
    assert main("mix", [*MIX, "--start-over-source", "books"]) == 0
    assert made_at(mixture, "web") == web
    assert not set(made_at(mixture, "books")) & set(books)
    assert main("mix", [*MIX, "--start-over-source", "boks"]) == 1
    assert "start_over_source=boks: must be a source of mine. Fix: " in capsys.readouterr().err


def test_sources_of_one_dataset_have_folders_of_their_own(tmp_path):
    sources = [
        MixedSource(source="a/data", name="first", weight=1, patterns=["x/*"]),
        MixedSource(source="a/data", name="second", weight=1, patterns=["y/*"]),
        MixedSource(source="a/other", weight=1),
    ]
    mixing = Mixing("mine", Mixture(sources=sources, vocab_size=300), Preparation(""))
    raw = {name: raw_folder(one.source(), one).name for name, one in mixing.preparations().items()}
    assert raw == {"first": "mine_first_raw", "second": "mine_second_raw", "other": "other_raw"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("source: books", "source: gone/"), "sources.1: source=gone/: file or folder not found"),
        (("source: books", "source: data"), "sources.1: "),
        (("source: books", "source: web"), "sources.1: name=web: must be unique. Fix: give this source"),
        (("filters: [pii]", "filters: [nothing]"), "sources.0: filter=nothing: must be one of"),
        (("filters: [pii]", "near_dedup: {rows: 2}"), "sources.0: near_dedup="),
        (("vocab_size: 400", "tokenizer: gone/"), "gone"),
    ],
)
def test_nothing_is_made_where_a_source_is_wrong(mixture, capsys, change, message):
    (mixture / "mine.yaml").write_text(MIXTURE.replace(*change))
    assert main("mix", ["mine.yaml"]) == 1
    assert message in capsys.readouterr().err
    assert not (mixture / "data").exists()


@pytest.mark.slow
def test_a_run_trains_on_it(mixture, runs):
    assert main("mix", MIX) == 0
    facts = json.loads((mixture / "data/mine/mixture.json").read_text())
    names = {"TRAIN_DATA": facts["train_data"], "VALID_DATA": facts["valid_data"]}
    data = {name: re.sub(r"(?<= )data/", f"{mixture}/data/", value) for name, value in names.items()}
    ended = runs.succeed("mixed", TRAIN_ITERS=12, VOCAB_SIZE=facts["vocab_size"], SEQ_LEN=32, **data)
    losses = ended.curve("lm_loss")
    assert len(losses) == 12 and losses[-1] < losses[0]
