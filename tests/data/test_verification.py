"""verify finds what has changed since a step made its files; compare finds how two corpora differ."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from helpers.token_files import write_tokens
from moe_exp.cli import main
from moe_exp.data.documents import Tally
from moe_exp.data.download.sources import python_stdlib_documents
from moe_exp.data.inspection import difference, num_duplicates
from moe_exp.data.stage import run_stage
from moe_exp.data.verification import compare, find_manifest, verify
from moe_exp.host.files import file_hash

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


@pytest.fixture(scope="module")
def texts():
    return sorted({text for _, text in islice(python_stdlib_documents(), 100) if text})[:60]


def lines(texts):
    return "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts))


def tally_of(texts):
    tally = Tally()
    for text in texts:
        tally.add(text.encode())
    return tally


def shuffled_folder(folder, train, valid, changes=None):
    """Two shards and a validation file, with a manifest as the shuffle writes it."""
    shards = {"c.chunk.00.jsonl": train[::2], "c.chunk.01.jsonl": train[1::2], "c.val.jsonl": valid}
    with run_stage("shuffle", folder, settings={"text_field": "text", "seed": 1}, inputs=[]) as stage:
        for name, part in shards.items():
            (stage.folder / name).write_text(lines(part))
        texts = {"read": [*train, *valid], "train": train, "valid": valid}
        facts = {name: tally_of(part).to_json() for name, part in texts.items()}
        facts |= {"num_documents": {name: len(part) for name, part in shards.items()}}
        stage.finish([stage.folder / name for name in shards], **(facts | (changes or {})))
    return folder


def token_files(prefix, documents, **facts):
    prefix.parent.mkdir(exist_ok=True)
    with run_stage("tokenize", prefix, settings={}, inputs=[], is_folder=False) as stage:
        write_tokens(stage.folder / prefix.name, documents)
        stage.finish([stage.folder / f"{prefix.name}{suffix}" for suffix in (".bin", ".idx")], **facts)
    return prefix


def problems(path):
    return {finding.name: finding.problem for finding in verify(path) if finding.problem}


def test_nothing_is_wrong(texts, tmp_path):
    folder = shuffled_folder(tmp_path / "x", texts[:50], texts[50:])
    findings = list(verify(folder))
    assert [finding.problem for finding in findings] == [""] * 8
    names = ["c.chunk.00.jsonl", "c.chunk.01.jsonl", "c.val.jsonl"]
    assert [finding.name for finding in findings[:3]] == names
    assert findings[-2].facts == f"60, text hash {tally_of(texts).text_hash:032x}"
    assert findings[-1].facts == "none of the 10 validation documents is in the training files"
    assert problems(folder / "manifest.json") == problems(folder / "c.val.jsonl") == {}


def test_every_kind_of_damage(texts, tmp_path):
    folder = shuffled_folder(tmp_path / "x", texts[:50], texts[50:])
    shard = folder / "c.chunk.00.jsonl"
    whole = shard.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    shard.write_bytes(flipped)
    assert problems(folder) == {shard.name: "has changed since it was created: its hash differs"}
    assert problems(shard) == problems(folder)
    assert problems(folder / "c.val.jsonl") == {}
    shard.write_bytes(whole[:-5])
    rule = f"has {len(whole) - 5:,} bytes, the manifest lists {len(whole):,}"
    assert problems(folder) == {shard.name: rule}
    shard.unlink()
    assert problems(folder) == {shard.name: "is missing"}
    shard.write_bytes(whole)
    (folder / "c.chunk.02.jsonl").write_text(lines(texts[:1]))
    (folder / "notes.txt").write_text("of nobody's concern")
    assert problems(folder) == {"c.chunk.02.jsonl": "is not in the manifest"}


def test_step_that_lost_or_doubled_a_document(texts, tmp_path):
    """The files are as the step left them; its counts say what they should hold."""
    expected = {"train": tally_of(texts[:50]).to_json()}
    lost = shuffled_folder(tmp_path / "lost", texts[:49], texts[50:], expected)
    ((name, problem),) = problems(lost).items()
    assert name == "all documents"
    assert problem.startswith("num_documents is 59, the manifest lists 60; num_text_bytes is ")
    doubled = shuffled_folder(tmp_path / "doubled", [*texts[:49], texts[0]], texts[50:], expected)
    assert "text_hash is " in problems(doubled)["all documents"]
    assert "num_documents" not in problems(doubled)["all documents"]
    counts = {"c.chunk.00.jsonl": 26, "c.chunk.01.jsonl": 24, "c.val.jsonl": 10}
    moved = shuffled_folder(tmp_path / "moved", texts[:50], texts[50:], {"num_documents": counts})
    assert problems(moved) == {
        "c.chunk.00.jsonl": "has 25 documents, the manifest lists 26",
        "c.chunk.01.jsonl": "has 25 documents, the manifest lists 24",
    }


def test_validation_and_training_share_documents(texts, tmp_path):
    folder = shuffled_folder(tmp_path / "x", texts[:50], [*texts[48:60], texts[7]])
    rule = "3 training documents are also validation documents"
    assert problems(folder) == {"validation against training": rule}


def test_manifests_of_other_steps(texts, tmp_path):
    """`written` of a conversion, the counts of a merge, none at all."""
    for name, facts in {
        "convert": {"written": tally_of(texts[:50]).to_json()},
        "written": {"read": tally_of(texts).to_json(), "written": tally_of(texts[:50]).to_json()},
        "read": {"read": tally_of(texts[:50]).to_json(), "num_documents": {"shard of another folder": 50}},
        "top": tally_of(texts[:50]).to_json(),
        "none": {},
    }.items():
        output = tmp_path / name / "merged"
        output.parent.mkdir()
        settings = {"text_field": "content"} if name == "convert" else {}  # its inputs'
        with run_stage(name, output, settings=settings, inputs=[], is_folder=False) as stage:
            (stage.folder / "merged.jsonl").write_text("\n" + lines(texts[:50]))
            stage.finish([stage.folder / "merged.jsonl"], **facts)
        for path in (output, output.with_suffix(".jsonl"), output.with_name("merged.manifest.json")):
            assert problems(path) == {}
    with (tmp_path / "written" / "merged.jsonl").open("a") as file:
        file.write(lines(["more"]))
    manifest = tmp_path / "written" / "merged.manifest.json"
    content = json.loads(manifest.read_text())
    path = tmp_path / "written" / "merged.jsonl"
    content["outputs"][0] |= {"bytes": path.stat().st_size, "hash": file_hash(path)}
    manifest.write_text(json.dumps(content))
    assert "num_documents is 51, the manifest lists 50" in problems(manifest)["all documents"]


def test_token_files(tmp_path):
    documents = [[1, 2, 3], [4], []]
    counts = tally_of(["texts", "are not", "in these files"]).to_json()
    prefix = token_files(tmp_path / "a" / "x_text_document", documents, num_tokens=7, **counts)
    index_bytes = Path(f"{prefix}.idx").stat().st_size
    facts = ["14 bytes", f"{index_bytes} bytes", "3 documents, 7 tokens"]
    assert [finding.facts for finding in verify(prefix)] == facts
    assert problems(Path(f"{prefix}.bin")) == {}
    wrong = token_files(tmp_path / "b" / "x_text_document", documents, num_documents=4, num_tokens=8)
    rule = "has 3 documents, the manifest lists 4; has 7 tokens, the manifest lists 8"
    assert problems(wrong) == {"x_text_document": rule}
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-2])
    assert problems(prefix) == {"x_text_document.bin": "has 12 bytes, the manifest lists 14"}


def test_no_manifest(texts, tmp_path):
    (tmp_path / "x.jsonl").write_text(lines(texts[:3]))
    for path in (tmp_path, tmp_path / "x.jsonl", tmp_path / "gone"):
        with pytest.raises(ValueError, match=rf"^{path}: no manifest found"):
            find_manifest(path)
    for text in ("{", '{"stage": "x"}', '{"outputs": {}}', "[]"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest\.json: must be a manifest with a list of outputs"):
            find_manifest(tmp_path)


def test_compare_files_in_other_order(texts, tmp_path):
    folder = shuffled_folder(tmp_path / "x", texts[:50], texts[50:])
    (tmp_path / "all.jsonl").write_text(lines(reversed(texts)))
    assert compare(folder, tmp_path / "all.jsonl").problem == ""
    (tmp_path / "all.jsonl").write_text(lines([*texts[:57], texts[0], "new"]))
    found = compare(folder, tmp_path / "all.jsonl").problem
    assert found == f"3 documents are missing from {tmp_path}/all.jsonl, which has 2 additional ones"


def test_compare_token_files(tmp_path):
    documents = [[1, 2, 3], [4], [1, 2, 3]]
    prefix = token_files(tmp_path / "a", documents)
    builder = IndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype=np.int32)
    for ids in documents[::-1]:
        builder.add_document(np.array([*ids, 0]), [len(ids) + 1])
    builder.finalize(str(tmp_path / "b.idx"))
    assert compare(prefix, tmp_path / "b.bin").problem == ""
    other = token_files(tmp_path / "c", documents[:2])
    assert (
        compare(prefix, other).problem == f"1 documents are missing from {other}, which has 0 additional ones"
    )
    with pytest.raises(ValueError, match=r"must be of the same kind as"):
        compare(prefix, tmp_path)


@given(st.lists(st.integers(0, 8)), st.lists(st.integers(0, 8)))
def test_difference_of_multisets(one, other):
    sides = []
    for numbers in (one, other):
        sides.append(bytearray().join(xxh3_128_digest(b"%d" % number) for number in numbers))
    counts = Counter(one), Counter(other)
    assert difference(*sides) == ((counts[0] - counts[1]).total(), (counts[1] - counts[0]).total())
    assert num_duplicates(sides[0]) == len(one) - len(set(one))


def test_command(texts, tmp_path, capsys):
    folder = shuffled_folder(tmp_path / "x", texts[:50], texts[50:])
    assert main(["data", "verify", str(folder)]) == 0
    assert (
        "validation against training: ok, none of the 10 validation documents is in the training files\n"
        in capsys.readouterr().out
    )
    valid = folder / "c.val.jsonl"
    assert main(["data", "verify", str(folder), "--against", str(valid)]) == 1
    assert f"{folder} against {valid}: 50 documents are missing from " in capsys.readouterr().out
    (folder / "c.val.jsonl").unlink()
    assert main(["data", "verify", str(folder)]) == 1
    assert capsys.readouterr().out.splitlines()[2] == "c.val.jsonl: is missing"
    assert main(["data", "verify", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"moe-exp data: {tmp_path}: no manifest found")
