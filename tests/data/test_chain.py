"""The commands as people type them, from a name to a training run, with a hub that fails now and then."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import ROOT
from helpers.jsonl import read_texts

pytest.importorskip("datatrove")
pytest.importorskip("pyarrow")

from helpers.servers.hub import Fault, HubServer, write_fineweb_parquet
from helpers.warm_runs import answer_warm
from moe_exp.data.tokens.tokenizer import load_tokenizer

SCRIPTS = ROOT / "moe_exp/scripts"


def run(tmp_path: Path, *command: object, **variables: str) -> str:
    """Output of a command that must end well, in a folder that is not the checkout; texts are split."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    hub = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    environment = {**given, "PYTHONPATH": str(ROOT), **hub, **variables}
    words = [word for one in command for word in (one.split() if isinstance(one, str) else [str(one)])]
    if words[:2] == ["-m", "moe_exp"]:
        ended = answer_warm(words[2:], environment, tmp_path)
    else:
        options = {"capture_output": True, "text": True, "timeout": 300}
        ended = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_from_a_name_to_a_run(tmp_path, runs):
    for number in range(2):
        path = tmp_path / f"hub/sample/10BT/{number:03d}_00000.parquet"
        write_fineweb_parquet(path, num_documents=80 * (number + 1))
    import pyarrow.parquet

    tables = [pyarrow.parquet.read_table(path) for path in sorted(tmp_path.rglob("*.parquet"))]
    given = [text for table in tables for text in table.column("text").to_pylist()]
    flags = "fineweb_edu_10bt --revision main --nchunks 3 --workers 1"
    prepare = [SCRIPTS / "download_prepare_hf_data.py", flags]
    with HubServer(tmp_path / "hub", repository="HuggingFaceFW/fineweb-edu") as server:
        assert "2 files" in run(tmp_path, *prepare, "--dry-run", HF_ENDPOINT=server.url)
        assert not (tmp_path / "data").exists()
        server.faults += [Fault(status=429, headers={"Retry-After": "0"}), Fault(status=503, where="/api/")]
        server.faults += [Fault(cut_after=20_000), Fault(reset_after=5_000)]
        run(tmp_path, *prepare, HF_ENDPOINT=server.url)
        assert not [fault for fault in server.faults if fault.times]
        asked = len(server.requests)
        run(tmp_path, *prepare, HF_ENDPOINT=server.url)
        assert len(server.requests) - asked <= 2
    chunks, shuffled = tmp_path / "data/fineweb_edu_10bt", tmp_path / "data/fineweb_edu_10bt_shuffled"
    names = [path.name for path in sorted(chunks.glob("*.jsonl"))]
    assert names == [f"fineweb_edu_10bt.chunk.{task:05d}.jsonl" for task in range(2)]
    names = [path.name for path in sorted(shuffled.glob("*.jsonl"))]
    shards = [f"fineweb_edu_10bt.chunk.{shard:02d}.jsonl" for shard in range(3)]
    assert names == [*shards, "fineweb_edu_10bt.val.jsonl"]
    valid = shuffled / "fineweb_edu_10bt.val.jsonl"
    names = "--valid_file_name fineweb_edu_10bt.val --output_file_name merged"
    run(tmp_path, "-m moe_exp data merge --input_dir", shuffled, names)
    train = tmp_path / "data/merged.jsonl"
    texts, held_out = read_texts(train), read_texts(valid)
    assert sorted([*texts, *held_out]) == sorted(filter(None, given)) and not set(texts) & set(held_out)

    run(tmp_path, "-m moe_exp data train-tokenizer", train, "--vocab-size 600 --out tokenizer")
    words = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --append-eod --workers 2"
    for name, path in (("train", train), ("valid", valid)):
        files = ["--input", path, f"--output-prefix data/{name}"]
        out = run(tmp_path, SCRIPTS / "preprocess_data.py", *files, words)
        assert out.splitlines()[-1] == f"TRAIN_DATA=data/{name}_text_document VOCAB_SIZE=600"
    tokenizer = load_tokenizer("HuggingFaceTokenizer", model=str(tmp_path / "tokenizer"))
    tokens = np.fromfile(tmp_path / "data/train_text_document.bin", dtype=np.uint16)
    assert np.count_nonzero(tokens == tokenizer.eod_id) == len(texts)
    inspected = json.loads(run(tmp_path, "-m moe_exp data inspect data/train_text_document --json"))
    assert inspected["documents"] == len(texts)
    for path in (shuffled, chunks, train, tmp_path / "data/valid_text_document"):
        run(tmp_path, "-m moe_exp data verify", path)

    # A model for which a run is little more than its imports.
    names = {"TRAIN_DATA": "data/train_text_document", "VALID_DATA": "data/valid_text_document"}
    paths = {name: tmp_path / path for name, path in (names | {"TOKENIZER": "tokenizer"}).items()}
    small = {"VOCAB_SIZE": 600, "TRAIN_ITERS": 3, "EVAL_INTERVAL": 3, "EVAL_ITERS": 1}
    ended = runs.succeed("chain", **paths, **small)
    assert len(ended.curve("lm_loss")) == 3
    assert all(5 < loss < 8 for loss in [*ended.curve("lm_loss"), ended.records("valid")[0]["lm_loss"]])
