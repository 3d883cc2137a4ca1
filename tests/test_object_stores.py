"""Corpora, tokens and checkpoints at an object store: moto's S3 server, whose requests fail now and then."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytest.importorskip("datatrove")

from helpers.jsonl import write_jsonl
from helpers.token_files import write_tokens
from helpers.whole_runs import TINY
from moe_exp.checkpoint.remote import fetch_checkpoint
from moe_exp.cli import main
from moe_exp.config import ConfigError, load_config
from moe_exp.data.download.hub import download
from moe_exp.data.download.sources import resolve_source
from moe_exp.data.download.stores import pull, push
from moe_exp.data.samples.dataset import SampleStream, content_of, fingerprint_of
from moe_exp.data.tokens import ranged
from moe_exp.data.tokens.manifests import with_vocab_size
from moe_exp.data.tokens.tokens import TokenFiles, bin_idx_problem
from moe_exp.host.object_store import Store
from moe_exp.launch.machine_checks import check_files
from moe_exp.runs.run_folder import LATEST

ROOT_URL = "s3://bucket"


@pytest.fixture(autouse=True)
def a_disk_with_room(monkeypatch):
    """Whatever the disk of this machine has."""
    monkeypatch.setattr(ranged, "_LEFT_FREE_BYTES", 0)


def write_numbered(path, first, count):
    numbers = range(first, first + count)
    return write_jsonl(path, [{"text": f"document {n} " + "word " * (n % 50), "id": str(n)} for n in numbers])


def command(*words):
    assert main(["data", *map(str, words)]) == 0


def test_the_chain_from_a_store_gives_the_bytes_of_the_local_one(server, url, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        path = write_numbered(tmp_path / f"raw/part/{number}.jsonl", 100 * number, 100)
        Store(f"{url}/raw").upload(path, f"part/{number}.jsonl")
    command("prepare", "raw", "--data-dir", "here", "--tasks", 2, "--nchunks", 2, "--workers", 1)
    server.fail(0.05)
    prepare = ["prepare", f"{url}/raw", "--data-dir", "there", "--tasks", 2, "--nchunks", 2, "--workers", 1]
    command(*prepare)
    here, there = tmp_path / "here/raw_shuffled", tmp_path / "there/raw_shuffled"
    for name in ("raw.chunk.00.jsonl", "raw.chunk.01.jsonl", "raw.val.jsonl"):
        assert (there / name).read_bytes() == (here / name).read_bytes()
    # done: no request
    server.fail(0)
    command(*prepare)
    assert server.counts()["requests"] == 0

    server.fail(0.05)
    command("push", "there/raw_shuffled", f"{url}/shards")
    command("pull", f"{url}/shards", "back/raw_shuffled")
    for path in there.iterdir():
        assert (tmp_path / "back/raw_shuffled" / path.name).read_bytes() == path.read_bytes()
    assert "complete" in capsys.readouterr().out


def test_token_files_there_and_back(url, tmp_path):
    prefix = write_manifested_tokens(tmp_path / "train")
    assert push(prefix, f"{url}/tokens") == f"{url}/tokens/train"
    places = {"a": "tokens", "b": "tokens/train", "c": "tokens/train.idx"}
    for folder, place in places.items():
        assert len(pull(f"{url}/{place}", tmp_path / folder)) == 2
        for name in ("train.bin", "train.idx", "train.manifest.json"):
            assert (tmp_path / folder / name).read_bytes() == prefix.with_name(name).read_bytes()
    # other bytes of the same length
    Store(f"{url}/tokens").write("train.bin", bytes(prefix.with_name("train.bin").stat().st_size))
    with pytest.raises(ConnectionError, match="hash of the received bytes differs from its manifest"):
        pull(f"{url}/tokens", tmp_path / "d")
    assert not (tmp_path / "d/train.manifest.json").exists() and not (tmp_path / "d/train.bin").exists()
    Store(f"{url}/tokens").remove("train.manifest.json")
    with pytest.raises(ValueError, match="is incomplete"):
        pull(f"{url}/tokens", tmp_path / "e")
    with pytest.raises(ValueError, match="is not a finished output"):
        push(tmp_path, url)


def test_what_a_pull_has_not_made_stays(url, tmp_path):
    prefix = write_manifested_tokens(tmp_path / "train")
    push(prefix, f"{url}/tokens")
    mine = tmp_path / "mine/train.bin"
    mine.parent.mkdir()
    mine.write_bytes(bytes(prefix.with_name("train.bin").stat().st_size))
    with pytest.raises(ValueError, match=r"exists and was not pulled\. Fix: choose"):
        pull(f"{url}/tokens", tmp_path / "mine")
    assert not any(mine.read_bytes()) and [path.name for path in mine.parent.iterdir()] == ["train.bin"]


def test_a_folder_that_is_called_like_a_file(url, tmp_path):
    part = write_numbered(tmp_path / "part.jsonl", 0, 3)
    Store(url).upload(part, "data.jsonl/part-0.jsonl")
    paths = download(resolve_source(f"{url}/data.jsonl"), tmp_path / "raw")
    assert [path.read_bytes() for path in paths] == [part.read_bytes()]
    # a file that has gone since, and is another one there
    paths[0].unlink()
    Store(url).upload(write_numbered(tmp_path / "other.jsonl", 5, 3), "data.jsonl/part-0.jsonl")
    with pytest.raises((ConnectionError, OSError)):
        download(resolve_source(f"{url}/data.jsonl"), tmp_path / "raw")
    assert not paths[0].exists()


def write_manifested_tokens(prefix, num_documents=300, seed=1):
    """Token files as `moe-exp data tokenize` leaves them: with a manifest."""
    from moe_exp.host.files import file_hash

    prefix.parent.mkdir(parents=True, exist_ok=True)
    choice = np.random.default_rng(seed)
    lengths = choice.integers(1, 400, num_documents)
    write_tokens(prefix, (choice.integers(1, 500, length) for length in lengths), 500)
    paths = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
    outputs = [{"name": path.name, "bytes": path.stat().st_size, "hash": file_hash(path)} for path in paths]
    manifest = {"stage": "tokenize", "settings": {"tokenizer": {"vocab_size": 500, "eod_id": 0}}}
    prefix.with_name(f"{prefix.name}.manifest.json").write_text(json.dumps(manifest | {"outputs": outputs}))
    return prefix


def pushed(url, tmp_path, **options):
    prefix = write_manifested_tokens(tmp_path / "local/train", **options)
    return prefix, push(prefix, f"{url}/tokens")


def test_tokens_at_a_store_are_the_samples_of_the_local_files(server, url, tmp_path, monkeypatch):
    monkeypatch.setattr(ranged, "_BLOCK_BYTES", 4096)
    prefix, there = pushed(url, tmp_path)
    server.fail(0.05)
    here = ranged.ensure_index(there, tmp_path / "data")
    assert bin_idx_problem(here) is None and not (tmp_path / f"{here}.bin").exists()
    local, remote = (SampleStream([(1.0, str(one))], seq_len=64, seed=3) for one in (prefix, here))
    assert fingerprint_of([str(prefix)]) == fingerprint_of([here])
    assert content_of([str(prefix)]) == content_of([here])
    for index in range(0, 2000, 7):  # more than an epoch
        assert (local.sample(index) == remote.sample(index)).all()
    a, b = TokenFiles(prefix), TokenFiles(here)
    assert a.end_of_document == b.end_of_document and (a.read(5, 5000) == b.read(5, 5000)).all()
    # what was read comes from here, in this process and in the next
    server.fail(0)
    again = SampleStream([(1.0, here)], seq_len=64, seed=3)
    server.fail(0)
    assert (again.batch(0, 200) == local.batch(0, 200)).all()
    assert server.counts()["requests"] == 0


def opened(prefix):
    """The bytes of a .bin at a store."""
    return ranged.open_remote(prefix, np.dtype(np.uint8))


def test_blocks_that_a_crash_has_spoilt_are_read_again(url, tmp_path, monkeypatch):
    monkeypatch.setattr(ranged, "_BLOCK_BYTES", 4096)
    prefix, there = pushed(url, tmp_path)
    here = ranged.ensure_index(there, tmp_path / "data")
    whole = prefix.with_name("train.bin").read_bytes()
    assert opened(here)[0 : len(whole)].tobytes() == whole
    with (tmp_path / f"{here}.blocks").open("r+b") as file:
        file.seek(5000)
        file.write(bytes(3000))
    assert opened(here)[0 : len(whole)].tobytes() == whole
    # other tokens at the store, as many: another copy
    write_manifested_tokens(tmp_path / "local/train", seed=2)
    assert len(whole) != prefix.with_name("train.bin").stat().st_size
    push(prefix, f"{url}/tokens")
    assert ranged.ensure_index(there, tmp_path / "data") != here


def test_tokens_that_change_at_the_store_end_the_run(url, tmp_path, monkeypatch):
    monkeypatch.setattr(ranged, "_BLOCK_BYTES", 4096)
    prefix, there = pushed(url, tmp_path)
    file = opened(ranged.ensure_index(there, tmp_path / "data"))
    first = file[0:100].tobytes()
    Store(f"{url}/tokens").write("train.bin", bytes(prefix.with_name("train.bin").stat().st_size))
    assert file[0:100].tobytes() == first  # kept
    with pytest.raises(ValueError, match="was replaced while it was being read"):
        file[8192:8292]


def test_ends_of_documents_are_found_without_their_blocks(server, url, tmp_path):
    prefix, there = pushed(url, tmp_path, num_documents=50)
    files = TokenFiles(ranged.ensure_index(there, tmp_path / "data"))
    assert files.end_of_document == TokenFiles(prefix).end_of_document
    assert files.share_ending_with(0) == 1.0
    assert not any((tmp_path / f"{files.prefix}.hashes").read_bytes())


def test_the_vocabulary_is_that_of_the_manifests_there(url, tmp_path, monkeypatch):
    _, there = pushed(url, tmp_path)
    data = load_config({}, {**TINY, "TRAIN_DATA": f"{there} {there}.bin"})
    assert with_vocab_size(data, set(), None)[0].vocab_size == 500

    def away(*_):
        raise ConnectionError(f"{there}: keeps failing (away). Fix: check the network.")

    monkeypatch.setattr(Store, "read", away)
    with pytest.raises(ConfigError, match="keeps failing"):  # and not another model
        with_vocab_size(data, set(), None)


def no_space(*_):
    raise OSError(28, "No space left on device")


def nearly_full(*_):
    return SimpleNamespace(f_frsize=4096, f_blocks=10**6, f_bavail=10**5 - 1)


FULL = [("pwrite", no_space, "No space left"), ("fstatvfs", nearly_full, "less than 0.381 GiB of free space")]


@pytest.mark.parametrize(("call", "answer", "line"), FULL, ids=["full", "nearly full"])
def test_a_full_disk_costs_requests_and_no_tokens(call, answer, line, url, tmp_path, monkeypatch, caplog):
    prefix, there = pushed(url, tmp_path)
    here = ranged.ensure_index(there, tmp_path / "data")
    monkeypatch.setattr(ranged, "_LEFT_FREE_BYTES", 2**30)
    monkeypatch.setattr(ranged.os, call, answer)
    file, whole = opened(here), prefix.with_name("train.bin").read_bytes()
    assert file[10:90].tobytes() == file[10:90].tobytes() == whole[10:90]
    assert caplog.text.count(line) == 1
    assert not any((tmp_path / f"{here}.hashes").read_bytes())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"TRAIN_DATA": "{url}/tokens/other"}, "s3://bucket/{name}/tokens/other.bin not found. Fix: "),
        ({"TRAIN_DATA": "{url}/x.jsonl"}, "only token files can be read from an object store, not text"),
        ({"DATA_ORDER": "megatron"}, "only supports local files. Fix: download {url}/tokens/train with"),
        ({"REMOTE_DIR": "/tmp/x"}, "REMOTE_DIR=/tmp/x: must be a URL."),
        ({"LOAD_DIR": "{url}/none"}, "LOAD_DIR={url}/none: has no complete checkpoint. Fix: specify a"),
    ],
)
def test_settings_that_cannot_run_are_one_line(settings, line, url, tmp_path):
    _, there = pushed(url, tmp_path)
    given = {"TRAIN_DATA": there, "EVAL_INTERVAL": 0, "RUN_DIR": tmp_path, "DATA_DIR": tmp_path, **settings}
    config = load_config({}, {**TINY, **{name: str(value).format(url=url) for name, value in given.items()}})
    (problem,) = [*config.problems(), *check_files(config)]
    assert line.format(url=url, name=tmp_path.name) in problem and "\n" not in problem
    assert [path.name for path in tmp_path.iterdir()] == ["local"]


def test_a_run_from_a_store_with_its_checkpoints_there(server, url, tmp_path, runs):
    """Losses and checkpoints of a run on local files, to the bit; stopped, and resumed by another machine."""
    prefix, there = pushed(url, tmp_path)
    settings = {"TRAIN_ITERS": 6, "SAVE_INTERVAL": 2, "EVAL_INTERVAL": 2, "EVAL_ITERS": 1, "MBSZ": 4}
    local = runs.succeed("local", TRAIN_DATA=prefix, VALID_DATA=prefix, **settings)
    server.fail(0.05)
    data = {"TRAIN_DATA": there, "VALID_DATA": there, "REMOTE_DIR": f"{url}/runs", "KEEP_LAST": 2}
    first = runs.stopped("there", EXIT_INTERVAL=4, DATA_DIR=tmp_path / "one", **data, **settings)
    assert [event["iteration"] for event in first.records("event") if event["event"] == "upload"][-1] == 4
    folder = f"{url}/runs/there"
    assert {path.name for path in first.folder.checkpoints.iterdir()} >= {"iter_0000004"}
    # another machine: no run folder, no blocks
    shutil.rmtree(first.folder.path)
    second = runs.succeed("there", DATA_DIR=tmp_path / "two", **data, **settings)
    assert "resumed from iteration 4" in second.text
    assert server.counts()["failed"] > 0
    for name in ("lm_loss", "grad_norm"):
        assert second.curve(name) == local.curve(name)
    names = Store(f"{folder}/checkpoints").files()
    kept = {name.partition("/")[0] for name in names if "/" in name}
    assert len(kept) == 2 and "iter_0000006" in kept  # a save beside a slow copy is left out
    for path in (second.folder.checkpoints / "iter_0000006").iterdir():
        assert Store(f"{folder}/checkpoints/iter_0000006").read(path.name) == path.read_bytes()
    assert Store(folder).read("config.yaml") == second.folder.config.read_bytes()
    # LOAD_DIR there
    newest = fetch_checkpoint(folder, tmp_path / "loaded")
    assert newest.name == "iter_0000006" and (tmp_path / "loaded" / LATEST).read_text() == "6"
    for path in (second.folder.checkpoints / newest.name).iterdir():
        assert (newest / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_a_store_that_cannot_be_written_ends_the_start_and_later_ones_copy(url, tmp_path, runs):
    prefix = write_manifested_tokens(tmp_path / "train")
    data = {"TRAIN_DATA": prefix, "TRAIN_ITERS": 4, "SAVE_INTERVAL": 2}
    ended = runs.run("a", REMOTE_DIR=f"{ROOT_URL}-is-missing/runs", **data)
    assert ended.code == 2 and "bucket not found. Fix: create it, or correct the URL." in ended.text
    assert not ended.folder.metrics.exists()
    runs.succeed("a", **data)
    # with nothing to train
    again = runs.succeed("a", REMOTE_DIR=f"{url}/runs", **data)
    assert "iter_0000004/manifest.json" in Store(f"{url}/runs/a/checkpoints").files()
    assert [event["iteration"] for event in again.records("event") if event["event"] == "upload"] == [4]
