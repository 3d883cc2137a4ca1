"""TRAIN_DATA that names text: prepared once, found again, made again if it changed; wrong text is named."""

import json
import logging
import os
import random
import re
from pathlib import Path
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from helpers.whole_runs import Runs
from moe_exp.checkpoint.format.settings import saved_order
from moe_exp.config import ConfigError, load_config
from moe_exp.config.setting_types import blend_members, is_text
from moe_exp.data import prepared_text
from moe_exp.data.own_text import (
    find_prepared_text,
    fitting_vocab_size,
    plan_text,
    text_problems,
    with_prepared_text,
)
from moe_exp.data.stage import Unfinished
from moe_exp.data.tokens.tokenizer import tokenizer_vocab_size
from moe_exp.data.tokens.tokenizer_training import train_bpe
from moe_exp.data.tokens.tokens import TokenFiles, manifest_of, tokenizer_fact
from moe_exp.inference.evaluate import EvalRequest, plan_evaluation
from moe_exp.inference.text import tokenizer_for
from moe_exp.launch.machine_checks import data_problems
from moe_exp.launch.source_checks import data_warnings

WORDS = ["the", "a", "of", "expert", "router", "token", "layer", "learns", "sends", "drops", "keeps"]


def some_text(seed, num_words=300):
    choose = random.Random(seed)
    return " ".join(choose.choice(WORDS) for _ in range(num_words)) + "\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with a folder `text` of 40 files in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text/deep").mkdir(parents=True)
    for number in range(40):
        name = f"deep/{number}.md" if number % 2 else f"{number}.txt"
        (tmp_path / "text" / name).write_text(some_text(number))
    return tmp_path


def settings(**changes):
    return load_config({"preset": "cpu", "train_data": "text", "vocab_size": 300, **changes}, {})


def test_text_is_prepared_once_and_found_again(place, caplog):
    caplog.set_level(logging.INFO)
    used = with_prepared_text(settings())
    train, valid = TokenFiles(used.train_data), TokenFiles(used.valid_data)
    assert (train.num_documents + valid.num_documents, train.num_documents >= 30) == (40, True)
    assert (
        tokenizer_fact(manifest_of(used.train_data), "vocab_size")
        == tokenizer_vocab_size(used.tokenizer)
        <= 300
    )
    assert used.tokenizer == str(Path(used.train_data).parent / "tokenizer")
    assert "40 files" in caplog.text and "held out for validation" in caplog.text
    suffixes = sorted(path.suffix for path in place.glob("data/*/*"))
    assert suffixes == sorted(["", ".json", *(".bin", ".idx", ".json") * 2]), "nothing is left of the work"

    made_at = Path(f"{used.train_data}.bin").stat().st_mtime_ns
    caplog.clear()
    assert with_prepared_text(settings()) == used == find_prepared_text(settings())
    assert "already prepared" in caplog.text and Path(f"{used.train_data}.bin").stat().st_mtime_ns == made_at
    # the same content under another time
    os.utime(place / "text/0.txt", (1, 1))
    assert with_prepared_text(settings()) == used
    os.utime(place / "text/0.txt", (2, 2))
    assert find_prepared_text(settings()) == used

    # other options are other token files
    assert with_prepared_text(settings(text_documents="block")).train_data != used.train_data
    (place / "text").rename(place / "gone")
    assert find_prepared_text(settings()) == used


def test_a_changed_file_is_noticed(place, caplog):
    used = with_prepared_text(settings())
    held_out = TokenFiles(used.valid_data).num_documents
    (place / "text/0.txt").write_text(some_text(100))
    (place / "text/more.txt").write_text(some_text(101))
    (place / "text/2.txt").unlink()
    again = with_prepared_text(settings())
    assert again.train_data != used.train_data
    why = "text: preparing again because files differ from those prepared in "
    assert [one for one in caplog.messages if one.startswith(why)]
    assert "1 changed (0.txt); 1 new (more.txt); 1 gone (2.txt)" in caplog.text
    assert abs(TokenFiles(again.valid_data).num_documents - held_out) <= 3


def test_a_file_that_was_edited_in_place_is_noticed(place, caplog):
    """Of the same size: only its content says so."""
    used, path = with_prepared_text(settings()), place / "text/0.txt"
    path.write_text(path.read_text().replace("the", "a b"))
    caplog.set_level(logging.INFO)
    assert with_prepared_text(settings()).train_data != used.train_data
    assert "1 changed (0.txt)" in caplog.text


def test_every_document_ends_with_its_token(place):
    for prefix in (with_prepared_text(settings()).train_data, with_prepared_text(settings()).valid_data):
        files = TokenFiles(prefix)
        ends = [files.read(end - 1, end)[0] for end in files.document_bounds[1:].tolist()]
        assert set(ends) == {tokenizer_fact(manifest_of(prefix), "eod_id")}


def test_an_interrupted_preparation_resumes(place, monkeypatch):
    # the latter is what a full disk or a worker that was killed for memory leaves
    for error, seen in ((KeyboardInterrupt(), KeyboardInterrupt), (Unfinished("a worker died"), ConfigError)):
        with monkeypatch.context() as patch:
            patch.setattr(prepared_text, "tokenize_files", Mock(side_effect=error))
            with pytest.raises(seen):
                with_prepared_text(settings())
        (partial,) = place.glob("data/*.partial")
        assert (partial / "tokenizer/tokenizer.json").exists() and not list(place.glob("data/*/text.json"))
    (partial / "documents/manifest.json").write_text("{")  # damaged: it begins anew
    used = with_prepared_text(settings())
    assert TokenFiles(used.train_data).num_documents > 30 and not partial.exists()


def test_one_file_with_split_or_valid_data(place):
    (place / "input.txt").write_text("".join(some_text(number) + "\n" for number in range(30)))
    used = with_prepared_text(settings(train_data="input.txt"))
    assert TokenFiles(used.valid_data).num_documents >= 1, "pieces of a single file are held out"
    given = {"train_data": "input.txt", "tokenizer": used.tokenizer}
    split = with_prepared_text(settings(**given, split="90,10"))
    assert not split.valid_data and split.split == "90,10"
    both = with_prepared_text(settings(**given, valid_data="text/*.txt"))
    assert TokenFiles(both.valid_data).num_documents == 20
    assert both.tokenizer == used.tokenizer and both.train_data == split.train_data
    blend = with_prepared_text(settings(**given | {"train_data": "0.3 text 0.7 input.txt"}))
    assert blend_members(blend.train_data)[1] == ("0.7", used.train_data) or "0.7" in blend.train_data
    assert [weight for weight, _ in blend_members(blend.valid_data)] == ["0.3", "0.7"]
    # token files stay what they are
    assert not is_text(used.train_data) and not is_text(f"{used.train_data}.bin")
    assert with_prepared_text(settings(train_data=used.train_data, split="9,1")).train_data == used.train_data


SLOW_NAMES = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("./text", "text/", "ABSOLUTE", "text/**/*")
]


@pytest.mark.parametrize("name", ["text/../text", "link", *SLOW_NAMES])
def test_a_stage_may_spell_a_text_otherwise(name, place):
    """Documents of TRAIN_DATA that are held out are held out of it, whatever it calls them."""
    (place / "link").symlink_to(place / "text")
    name = name.replace("ABSOLUTE", str(place / "text"))
    stage = {"data_stages": json.dumps([{"from_samples": 64, "train_data": name}])}
    assert text_problems(settings(tokenizer=tokenizer_of(place), **stage)) == []
    for given in ({}, {"tokenizer": tokenizer_of(place)}):
        used = with_prepared_text(settings(**given, **stage))
        assert json.loads(used.data_stages)[0]["train_data"] == used.train_data
    assert len(plan_text(settings(**stage))) == 1


@pytest.mark.parametrize("name", ["text/*.txt", "text/deep", "more"])
def test_a_stage_of_some_files_of_a_text(name, place):
    (place / "more").mkdir()
    for path in ("text/0.txt", "text/deep/1.md"):
        (place / "more" / Path(path).name).symlink_to(place / path)
    (place / "more/2.txt").write_text(some_text(50))
    given = {"tokenizer": tokenizer_of(place)}
    given |= {"data_stages": json.dumps([{"from_samples": 64, "train_data": name}])}
    rule = f"DATA_STAGES={name}: shares only some files with TRAIN_DATA=text, which has held-out documents."
    for held_out in ({}, {"split": "9,1"}):
        (line,) = text_problems(settings(**given, **held_out))
        assert line.startswith(f"{rule} Fix: ")
    (place / "other.txt").write_text(some_text(60, 3000))
    used = with_prepared_text(settings(**given, valid_data="other.txt"))
    files = TokenFiles(json.loads(used.data_stages)[0]["train_data"])
    assert files.num_documents in (3, 20)


def test_validation_on_text_that_is_trained_on(place):
    given = {"tokenizer": tokenizer_of(place), "eval_interval": 1}
    (line,) = data_warnings(settings(**given, valid_data=str(place / "text/deep")))
    assert line.startswith(f"VALID_DATA={place}/text/deep: shares files with TRAIN_DATA=text, ")
    (place / "other.txt").write_text(some_text(60))
    assert data_warnings(settings(**given, valid_data="other.txt")) == []


def test_errors_of_held_out_documents_name_the_setting_of_the_text(place):
    (place / "few.jsonl").write_text("".join(json.dumps({"text": some_text(n, 9)}) + "\n" for n in range(9)))
    given = {"train_data": "few.jsonl", "tokenizer": tokenizer_of(place), "eval_interval": 1, "seq_len": 48}
    used = with_prepared_text(settings(**given))
    assert TokenFiles(used.valid_data).num_documents == 1
    (line,) = data_problems(used)
    assert line.startswith(f"TRAIN_DATA={used.valid_data}: has ") and " tokens for validation, " in line
    lines = data_warnings(used.model_copy(update={"seq_len": 8, "train_iters": 1}))
    assert f"TRAIN_DATA={used.valid_data}: has only one document: " in "".join(lines)
    # another text, which VALID_DATA names
    other = given | {"train_data": "text", "valid_data": "few.jsonl", "seq_len": 512}
    used = with_prepared_text(settings(**other))
    (line,) = data_problems(used)
    assert line.startswith(f"VALID_DATA={used.valid_data}: has ")


def tokenizer_of(place):
    """A tokenizer of 300 tokens, of no text in particular."""
    if not (folder := place / "tokenizer").exists():
        folder.mkdir()
        train_bpe([some_text(number) for number in range(9)], 300).save(str(folder / "tokenizer.json"))
    return str(folder)


def test_vocabulary_that_fits(place):
    assert fitting_vocab_size(settings()) == 512
    for size, vocab_size in ((4_900_000, 4096), (10**10, 32768)):
        with (place / "big.txt").open("wb") as file:
            file.truncate(size)
        assert fitting_vocab_size(settings(train_data="big.txt")) == vocab_size
    assert fitting_vocab_size(settings(train_data="a", split="9,1")) is None


def test_plan_writes_nothing(place):
    assert plan_text(settings(train_data="")) == plan_text(settings(train_data="a_prefix")) == []
    (line,) = plan_text(settings())
    assert line.startswith("TRAIN_DATA: 40 files, ") and "a 300-token tokenizer trained" in line
    (place / "other.txt").write_text(some_text(50))
    stages = json.dumps([{"from_samples": 64, "train_data": "other.txt"}])
    (_, line) = plan_text(settings(data_stages=stages, tokenizer=tokenizer_of(place)))
    assert line.startswith("DATA_STAGES: 1 files, ")
    assert not (place / "data").exists()
    used = with_prepared_text(settings())
    assert plan_text(settings())[0].endswith(f"already prepared in {Path(used.train_data).parent}")


BAD = {
    "none.txt": (None, r"TRAIN_DATA=none\.txt: not found\. Fix: check the path"),
    "empty.txt": (b"", r"TRAIN_DATA=empty\.txt: contains only empty files\. Fix: use non-empty files"),
    "a.docx": (b"PK", r"TRAIN_DATA=a\.docx: must end with .* Fix: save it as a\.txt, in UTF-8"),
    "a.csv": (b"a,b\n", r"TRAIN_DATA=a\.csv: must end with .* Fix: convert it to a\.jsonl"),
    "binary.txt": (bytes(1000), r"TRAIN_DATA=binary\.txt: binary\.txt, line 1: .* binary, .* Fix: remove"),
    "latin.txt": (b"caf\xe9\n", r"TRAIN_DATA=latin\.txt: latin\.txt, line 1: .* not UTF-8 text\. .*iconv"),
    "x.jsonl": (
        b'{"content": "a", "id": 1}\n',
        r"TRAIN_DATA=x\.jsonl: x\.jsonl has no field .*content, id\. Fix: ",
    ),
    "*.md": (None, r"TRAIN_DATA=\*\.md: no file matches the pattern\. Fix: check the path"),
    "1.0 text 2.0 text/deep": (None, r"is a blend with text, so TOKENIZER is required\. Fix: set TOKENIZER"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_text_is_named_before_anything_is_written(name, place):
    content, message = BAD[name]
    if content is not None:
        (place / name).write_bytes(content)
    (line,) = text_problems(settings(train_data=name))
    assert re.search(message, line)
    assert not (place / "data").exists()


def test_a_table_without_the_column_is_named(place):
    table = pyarrow.table({"body": ["a"], "id": [1]})
    pyarrow.parquet.write_table(table, place / "x.parquet")
    (line,) = text_problems(settings(train_data="x.parquet"))
    rule = "has no column 'text'; its columns are body, id"
    assert line.endswith(f"x.parquet: {rule}. Fix: set TEXT_FIELD to the text column.")
    (line,) = text_problems(settings(train_data="x.parquet", text_field="id"))
    assert "the column 'id' contains int64, not text" in line


def test_folders_that_cannot_be_used(place):
    (place / "images").mkdir()
    (place / "images/a.png").touch()
    (line,) = text_problems(settings(train_data="images"))
    assert "TRAIN_DATA=images: the folder contains no file ending" in line and "only .png" in line
    used = with_prepared_text(settings())
    folder = Path(used.train_data).parent
    (line,) = text_problems(settings(train_data=str(folder)))
    assert line.endswith(f"the folder contains token files. Fix: give their prefix, {folder}/train.")


def test_text_that_is_found_wrong_while_it_is_read(place):
    (place / "one.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    with pytest.raises(
        ConfigError, match=r"^TRAIN_DATA=one\.jsonl: contains only one document, .* Fix: add more text"
    ):
        with_prepared_text(settings(train_data="one.jsonl"))
    (place / "text/z.txt").write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match=r"^TRAIN_DATA=text: z\.txt, line 1: .* Fix: convert it"):
        with_prepared_text(settings())
    assert not list(place.glob("data/[!.]*"))


def test_a_run_on_a_folder_of_text_is_found_again_by_eval(place, tmp_path):
    runs = Runs(tmp_path / "runs", tmp_path / "data")
    text = {"TRAIN_DATA": tmp_path / "text", "VOCAB_SIZE": "", "EVAL_INTERVAL": 2, "EVAL_ITERS": 1}
    ended = runs.succeed("own", TRAIN_ITERS=2, **text)
    assert "VOCAB_SIZE=512: vocabulary of the tokenizer for " in ended.text
    assert f"{tmp_path / 'text'}: preparing 40 files" in ended.text
    (valid,) = ended.records("valid")
    assert valid["lm_loss_bits_per_byte"] > 0
    config = load_config(yaml.safe_load(ended.folder.config.read_text()), {})
    assert (config.train_data, config.valid_data, config.tokenizer) == (str(tmp_path / "text"), "", "")
    # text was added, and prepared for another run: this one keeps its own tokenizer and documents
    used = find_prepared_text(config)
    for number in range(12):  # some of them are held out
        (tmp_path / f"text/z{number}.txt").write_text(f"zyxwvutsrqponm {number} " * 300)
    other = with_prepared_text(config)
    assert find_prepared_text(config) == other != used
    trained = saved_order(ended.folder.checkpoints / "iter_0000002")["tokenizer"]
    assert find_prepared_text(config, trained) == used
    plan = plan_evaluation(EvalRequest(str(ended.folder.path)))
    assert [one.prefix for one in plan.sources] == [used.valid_data]
    with pytest.raises(ValueError, match="is text, and its token files were not found"):
        find_prepared_text(config, "0123456789abcdef")
    (tmp_path / "text").rename(tmp_path / "gone")
    plan = plan_evaluation(EvalRequest(str(ended.folder.path)))
    assert plan.token_bytes is not None and [Path(one.prefix).name for one in plan.sources] == ["valid"]
    assert tokenizer_for(config, "").vocab_size <= 512
