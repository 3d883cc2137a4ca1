"""Tokens that documents end and begin with, from tokenizing to the exported model; one tokenizer a run."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from helpers.checkpoint.small_job import end_run, small_settings, start_run
from helpers.jsonl import write_jsonl
from helpers.whole_runs import SMALL
from moe_exp import cli
from moe_exp.checkpoint.format.settings import saved_config, saved_order
from moe_exp.checkpoint.hf.exporting import to_hf
from moe_exp.config import Config, load_config
from moe_exp.data.embedded import embedded_folder
from moe_exp.data.own_text import with_prepared_text
from moe_exp.data.tokens.preprocess import merge_token_files
from moe_exp.data.tokens.text_bytes import TokenBytes
from moe_exp.data.tokens.tokenizer_training import train_bpe
from moe_exp.data.tokens.tokens import TokenFiles, manifest_of, other_tokenizer, tokenizer_fact
from moe_exp.inference.evaluate import EvalRequest, plan_evaluation
from moe_exp.inference.generate import GenerateRequest, plan_generation
from moe_exp.inference.text import tokenizer_for
from moe_exp.launch.machine_checks import data_problems

TEXTS = [f"The bird number {number} sings, and all others hear it. " * 9 for number in range(60)]
VOCAB, SPECIAL = 320, ("<|endoftext|>", "</s>", "<s>", "<end>")


def save_tokenizer(folder: Path, *, bos: bool = False, texts=TEXTS, **names: str) -> Path:
    """A byte-level BPE whose files name </s> as the end; with `bos` they begin a text with <s>."""
    tokenizer = train_bpe(texts, VOCAB, special_tokens=SPECIAL)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", SPECIAL.index("<s>"))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"} | names
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


def tokenize(folder: Path, name: str, tokenizer: Path, *flags: str) -> str:
    """Token files of TEXTS by the command; their prefix."""
    source = write_jsonl(folder / f"{name}.jsonl", [{"text": text} for text in TEXTS])
    line = ["data", "tokenize", "--input", str(source), "--output-prefix", str(folder / name), *flags]
    line += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    assert cli.main([*line, "--append-eod", "--workers", "1"]) == 0
    return f"{folder / name}_text_document"


def train(folder: Path, data: str, tokenizer: Path) -> Path:
    """The run folder of two iterations."""
    files = {"train_data": data, "tokenizer": str(tokenizer), "vocab_size": VOCAB}
    settings = small_settings(folder, "run", **files, train_iters=2)
    assert end_run(start_run(settings, folder / "printed"), folder / "printed") == [0]
    return folder / "run"


def iteration(run: Path) -> Path:
    return run / "checkpoints" / "iter_0000002"


@pytest.mark.parametrize(
    ("flags", "bos"),
    [
        pytest.param(("--eod-token", "<end>"), False, marks=pytest.mark.slow),
        (("--eod-token", "ÿ"), False),  # of the vocabulary, not an added token
        ((), True),
        pytest.param(("--prepend-bos", "--eod-token", "<end>"), True, marks=pytest.mark.slow),
        (("--prepend-bos",), False),  # the tokenizer adds none itself
    ],
)
def test_documents_of_the_training_decide(flags, bos, tmp_path, caplog):
    """Generation ends and begins as they do, and the exported tokenizer gives the tokens of the training."""
    folder = save_tokenizer(tmp_path / "tokenizer", bos=bos)
    data = tokenize(tmp_path, "data", folder, *flags)
    eod_token = flags[-1] if "--eod-token" in flags else "</s>"
    left_out = bos and "--prepend-bos" not in flags
    assert left_out == ("adds <s> before a text, but documents lack this token" in caplog.text)
    run = train(tmp_path, data, folder)

    files = TokenFiles(data)
    first, second = files.read(0, files.document_bounds[1]), files.document_bounds[1]
    tokenizer = plan_generation(GenerateRequest(str(run), prompts=("The bird",))).tokenizer
    assert (tokenizer.eod_id, tokenizer.eod_token) == (first[-1], eod_token)
    assert (tokenizer.bos_id is not None) == ("--prepend-bos" in flags)
    table = TokenBytes(tokenizer)
    assert table.each(first, np.arange(second) == 0).sum() == len(TEXTS[0].encode())

    assert to_hf(run, tmp_path / "exported").architecture
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert (exported.eos_token, exported.eos_token_id) == (eod_token, first[-1])
    assert exported(TEXTS[0]).input_ids == first[:-1].tolist()
    prompt = plan_generation(GenerateRequest(str(run), prompts=(TEXTS[0],), max_positions=500)).prompt_tokens
    assert prompt == [first[:-1].tolist()]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "exported" / name).read_text())["eos_token_id"] == first[-1]

    # weights alone keep them, also where the token files are gone
    places = {"average": tmp_path / "averaged", "reshape": tmp_path / "weights"}
    assert cli.main(["ckpt", "average", str(run), str(places["average"])]) == 0
    assert cli.main(["ckpt", "reshape", str(run), str(places["reshape"]), "--weights-only"]) == 0
    (tmp_path / "data").mkdir()
    for path in tmp_path.glob("data_text_document*"):
        path.rename(tmp_path / "data" / path.name)
    for name, place in places.items():
        assert plan_generation(GenerateRequest(str(place), prompts=("a",))).tokenizer == tokenizer
        to_hf(place, tmp_path / name)
        again = AutoTokenizer.from_pretrained(tmp_path / name)
        assert (again.eos_token, again(TEXTS[0]).input_ids) == (eod_token, first[:-1].tolist())
    for path in (tmp_path / "data").iterdir():
        path.rename(tmp_path / path.name)

    # an older checkpoint does not record them: the manifest beside the token files does
    config, order = saved_config(iteration(run)), saved_order(iteration(run))
    assert order["eod_id"] == first[-1]
    older = {name: value for name, value in order.items() if name not in ("eod_id", "bos_id")}
    assert tokenizer_for(config, "", order=older) == tokenizer


def test_text_with_and_without_bos(tmp_path):
    folder = save_tokenizer(tmp_path / "tokenizer", bos=True)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"text{number}.txt").write_text(text)
    first = {}
    for prepend in (False, True):
        config = Config(
            preset="cpu", train_data=str(tmp_path / "text*.txt"), tokenizer=str(folder), vocab_size=VOCAB,
            prepend_bos=prepend, data_dir=str(tmp_path / "data"),
        )  # fmt: skip
        files = TokenFiles(with_prepared_text(config).train_data)
        first[prepend] = {int(files.read(begin, begin + 1)[0]) for begin in files.document_bounds[:-1]}
        found = tokenizer_fact(manifest_of(files.prefix), "bos_id")
        assert found == (SPECIAL.index("<s>") if prepend else None)
    assert first[True] == {SPECIAL.index("<s>")} and not first[False] & first[True]


def test_no_bos_to_prepend(tmp_path, capsys):
    folder = save_tokenizer(tmp_path / "tokenizer", bos_token="<none>")
    with pytest.raises(AssertionError):
        tokenize(tmp_path, "data", folder, "--prepend-bos")
    assert "PREPEND_BOS=True" in capsys.readouterr().err


@pytest.fixture(scope="module")
def token_files(tmp_path_factory):
    """Prefixes of token files, and tokenizers of the same size."""
    place = tmp_path_factory.mktemp("tokens")
    mine = save_tokenizer(place / "mine")
    other = save_tokenizer(place / "other", texts=[text[::-1] for text in TEXTS])
    same = save_tokenizer(place / "same", bos=True)  # which gives the same ids, in other files
    content = json.loads((same / "tokenizer.json").read_text())
    content["model"] = dict(reversed(content["model"].items()))
    content["added_tokens"] = [token | {"special": False} for token in content["added_tokens"]]
    (same / "tokenizer.json").write_text(json.dumps(content))
    found = {"mine": mine, "same": same, "other": other, "data": tokenize(place, "data", mine)}
    found |= {"alike": tokenize(place, "alike", same)}
    found |= {"begun": tokenize(place, "begun", same, "--prepend-bos")}
    found |= {"valid": tokenize(place, "valid", mine), "alien": tokenize(place, "alien", other)}
    found["plain"] = str(place / "plain")  # without a manifest, as of another program
    for suffix in (".bin", ".idx"):
        shutil.copyfile(found["data"] + suffix, found["plain"] + suffix)
    found["ended"] = tokenize(place, "ended", mine, "--eod-token", "<end>")
    for name, shards in {"merged": ("data", "valid"), "merged_aliens": ("alien", "alien")}.items():
        found[name] = str(place / name)
        merge_token_files([Path(found[shard]) for shard in dict.fromkeys(shards)], Path(found[name]))
    return {name: str(path) for name, path in found.items()}


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"tokenizer": "mine"}, None),
        ({"tokenizer": "mine", "valid_data": "valid"}, None),
        ({"train_data": "ended", "tokenizer": "mine"}, None),
        ({"tokenizer": "same"}, None),
        ({"valid_data": "alike", "tokenizer": "mine"}, None),
        ({"valid_data": "begun"}, "VALID_DATA=.*begun.* documents of .* begin or end with different tokens"),
        ({"train_data": "merged", "valid_data": "valid", "tokenizer": "mine"}, None),
        ({"tokenizer": "other"}, "TOKENIZER=.*/other: is not the tokenizer of .*data_text_document"),
        ({"train_data": "merged", "tokenizer": "other"}, "TOKENIZER=.*/other: is not the tokenizer"),
        ({"valid_data": "alien"}, "VALID_DATA=.*alien"),
        ({"valid_data": "merged_aliens"}, "VALID_DATA=.*merged_aliens"),
        ({"valid_data": "ended"}, "VALID_DATA=.*ended"),
        ({"train_data": "1 data 1 alien"}, "TRAIN_DATA=.*alien"),
        ({"data_stages": "alien"}, "DATA_STAGES=.*alien"),
        ({"train_data": "1 plain 1 data", "valid_data": "alien"}, "VALID_DATA=.*alien"),
    ],
)
def test_all_data_are_of_one_tokenizer(settings, refused, token_files):
    named = {}
    for name, value in ({"train_data": "data"} | settings).items():
        named[name] = " ".join(token_files.get(word, word) for word in value.split())
    if "data_stages" in named:
        named["data_stages"] = json.dumps([{"from_samples": 8, "train_data": named["data_stages"]}])
    size = {"vocab_size": VOCAB, "seq_len": 16, "gbsz": 4, "mbsz": 2, "gpus_per_node": 1}
    config = load_config(SMALL | size | named, {})
    problems = list(data_problems(config))
    assert len(problems) == bool(refused)
    for line in problems:
        assert re.search(refused, line) and "ALLOW_OTHER_DATA=true" in line, line
        assert list(data_problems(config.model_copy(update={"allow_other_data": True}))) == []


def test_older_manifests_are_compared_by_what_they_have(token_files, tmp_path):
    """Theirs have no hash of what decides the ids."""
    for name in ("data", "valid", "alien"):
        manifest = json.loads(Path(f"{token_files[name]}.manifest.json").read_text())
        del manifest["tokenizer"]
        (tmp_path / f"{name}.manifest.json").write_text(json.dumps(manifest))
    assert other_tokenizer([str(tmp_path / "data"), str(tmp_path / "valid"), token_files["data"]]) == ""
    assert "different tokenizer.json files" in other_tokenizer([token_files["data"], str(tmp_path / "alien")])


def test_torchrun_alone_compares_tokenizers(token_files, tmp_path):
    """Without a launcher, which checks it before the ranks start."""
    for allowed, code in ((False, 2), (True, 0)):
        data = {"train_data": token_files["data"], "tokenizer": token_files["other"], "vocab_size": VOCAB}
        settings = small_settings(tmp_path, f"run{code}", **data, allow_other_data=allowed, train_iters=1)
        printed = tmp_path / f"printed{code}"
        assert end_run(start_run(settings, printed), printed) == [code]
        line = f"TOKENIZER={token_files['other']}: is not the tokenizer of {token_files['data']}"
        assert printed.read_text().count(line) == 1


def test_tokenizer_and_the_embedded_corpus(token_files, tmp_path):
    settings = {"preset": "cpu", "data_dir": str(tmp_path), "vocab_size": 4096}
    (line,) = data_problems(Config(**settings, tokenizer=token_files["mine"]))
    assert line.endswith("Fix: set TRAIN_DATA, or omit TOKENIZER: the corpus has its own tokenizer.")
    embedded_folder(tmp_path).mkdir()
    shutil.copy(Path(token_files["mine"]) / "tokenizer.json", embedded_folder(tmp_path))
    for name in ("mine", "same"):
        assert list(data_problems(Config(**settings, tokenizer=token_files[name]))) == []
    (line,) = data_problems(Config(**settings, tokenizer=token_files["other"]))
    assert f"TOKENIZER={token_files['other']}: is not the tokenizer of the embedded corpus" in line


def test_export_of_data_without_a_manifest_keeps_the_bos(token_files, tmp_path):
    """Nobody knows whether their documents begin with it."""
    run = train(tmp_path, token_files["plain"], Path(token_files["same"]))
    to_hf(run, tmp_path / "exported")
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert exported(TEXTS[0]).input_ids[0] == SPECIAL.index("<s>")


@pytest.mark.parametrize(("trained", "evaluated"), [("alike", "begun"), ("begun", "alike")])
def test_bytes_are_those_of_the_text_with_and_without_bos(trained, evaluated, token_files, tmp_path):
    """The BOS of this tokenizer is a token like others, which has bytes where it stands in a text."""
    run, data = train(tmp_path, token_files[trained], Path(token_files["same"])), token_files[evaluated]
    rule = f"^DATA={data}: documents of {data} and of the training data begin or end with different tokens"
    with pytest.raises(ValueError, match=rule):
        plan_evaluation(EvalRequest(str(run), data=(data,)))
    plan = plan_evaluation(EvalRequest(str(run), data=(data,), allow_other_data=True))
    (source,), (table,) = plan.sources, plan.token_bytes
    first = TokenFiles(data).read(0, 1)  # which nothing predicts
    expected = sum(map(len, TEXTS)) - table.each(first, np.array([True])).sum()
    assert source.count_bytes(0, source.read(0, len(source)), table, None) == expected
