"""Near-duplicates: found as often as the theory says, one of each stays, whatever the number of tasks."""

import json
import random

import numpy as np
import pytest

from helpers.jsonl import read_jsonl, write_parts
from moe_exp.data.convert import duplicates as module
from moe_exp.data.convert.convert import ConvertSettings, convert
from moe_exp.data.convert.duplicates import NearDuplicates, near_duplicates, smallest_labels
from moe_exp.data.convert.filters import word_tokenizer
from moe_exp.data.execution import Execution

pytest.importorskip("datatrove")

HERE = Execution(workers=1)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def some_words(choice, count):
    return ["".join(choice.choices(LETTERS, k=8)) for _ in range(count)]


def grams(words):
    return {tuple(words[first : first + 5]) for first in range(len(words) - 4)}


def similarity(first, second):
    first, second = grams(first), grams(second)
    return len(first & second) / len(first | second)


def probability(similarity):
    """Probability that two texts of a similarity are a pair."""
    how = NearDuplicates()
    return 1 - (1 - similarity**how.hashes_per_bucket) ** how.num_buckets


def planted(choice, words, wanted):
    """The words with as many others in places as gives a similarity next to the wanted one, and that."""
    places = choice.sample(range(len(words)), len(words))
    changed, found = list(words), 1.0
    for place in places:
        following = list(changed)
        following[place] = some_words(choice, 1)[0]
        reached = similarity(words, following)
        if abs(reached - wanted) >= abs(found - wanted):
            break
        changed, found = following, reached
    return changed, found


def write_files(folder, documents, number=4):
    return write_parts(folder, [{"text": text, "id": name} for name, text in documents], number)


def kept_by(inputs, output, num_tasks=1, **settings):
    """Ids that stay, and the manifest."""
    settings = {"near_dedup": NearDuplicates(), "tasks": num_tasks, **settings}
    manifest = convert(inputs, output, ConvertSettings(**settings), HERE)
    return {one["id"] for one in read_jsonl(*output.glob("*.jsonl"))}, manifest


def test_planted_near_duplicates_go_as_often_as_the_theory_says(tmp_path):
    choice, documents, expected = random.Random(3), [], {0.9: [], 0.8: [], 0.5: []}
    for number in range(500):
        words = some_words(choice, 150)
        documents.append((f"original {number}", " ".join(words)))
        if number % 2:
            wanted = (0.9, 0.8, 0.5)[number % 3]
            changed, found = planted(choice, words, wanted)
            documents.append((f"planted {number}", " ".join(changed)))
            expected[wanted].append((number, probability(found)))
    choice.shuffle(documents)
    inputs = write_files(tmp_path / "in", documents)
    kept, manifest = kept_by(inputs, tmp_path / "one")
    gone = {name for name, _ in documents} - kept
    assert manifest["filtered"]["near duplicate"]["num_documents"] == len(gone)
    # one of each pair, and nothing else
    numbers = [name.split()[1] for name in gone]
    assert len(set(numbers)) == len(numbers) and all(int(number) % 2 for number in numbers)
    for pairs in expected.values():
        share = sum(str(number) in numbers for number, _ in pairs) / len(pairs)
        theory = np.mean([probability for _, probability in pairs])
        spread = 3.5 * (theory * (1 - theory) / len(pairs)) ** 0.5 + 1 / len(pairs)
        assert abs(share - theory) < spread, (share, theory)
    again, counts = kept_by(inputs, tmp_path / "three", 3)
    assert again == kept
    assert counts["filtered"] == manifest["filtered"] and counts["written"] == manifest["written"]


def test_the_longest_stays_and_equal_texts_are_one(tmp_path):
    choice = random.Random(1)
    words = some_words(choice, 300)
    longest = [*words, "and", "more"]
    texts = {"short": words[:-3], "longest": longest, "middle": words, "other": some_words(choice, 300)}
    documents = [(name, " ".join(text)) for name, text in texts.items()]
    # too short for a shingle: equal ones are for --dedup
    documents += [("same 1", "four words are there"), ("same 2", "four words are there")]
    for order in (documents, documents[::-1]):
        inputs = write_files(tmp_path / order[0][0], order, 2)
        kept, manifest = kept_by(inputs, tmp_path / f"{order[0][0]}_out", 2)
        assert kept == {"longest", "other", "same 1", "same 2"}
    samples = json.loads((tmp_path / "short_out/datatrove/samples.json").read_text())
    stays = {sample["id"]: sample["stays"] for sample in samples}
    assert stays == {"longest": True, "middle": False, "short": False}
    assert len({sample["cluster"] for sample in samples}) == 1
    assert manifest["reasons"] == {}


def test_texts_without_spaces_are_compared_by_character(tmp_path):
    choice = random.Random(2)
    characters = [chr(choice.randrange(0x4E00, 0x9FA5)) for _ in range(400)]
    changed = [*characters[:200], "一", *characters[201:]]
    others = [chr(choice.randrange(0x4E00, 0x9FA5)) for _ in range(400)]
    documents = [("a", "".join(characters)), ("b", "".join(changed)), ("c", "".join(others))]
    kept, _ = kept_by(write_files(tmp_path / "in", documents, 1), tmp_path / "out")
    assert len(kept) == 2 and "c" in kept


def test_after_exact_duplicates_and_filters(tmp_path):
    choice = random.Random(4)
    words = some_words(choice, 200)
    near = [*words[:-1], "other"]
    documents = [(f"equal {number}", " ".join(words)) for number in range(3)]
    alone = " ".join(some_words(choice, 200))
    documents += [("near", " ".join(near)), ("short", "one two"), ("alone", alone)]
    inputs = write_files(tmp_path / "in", documents, 2)
    kept, manifest = kept_by(inputs, tmp_path / "out", 2, dedup=True, min_chars=20)
    dropped = {name: tally["num_documents"] for name, tally in manifest["filtered"].items()}
    assert dropped == {"length": 1, "duplicate": 2, "near duplicate": 1}
    assert "alone" in kept and len(kept) == 2


def test_a_long_document_is_signed_in_parts():
    from datatrove.pipeline.dedup import MinhashDedupSignature

    how = NearDuplicates()
    block = MinhashDedupSignature("unused", how.config(), language=word_tokenizer())
    shingles = np.random.default_rng(0).integers(0, 2**63, (5000, 1), dtype=np.uint64)
    for count in (1, 1023, 1024, 1025, 5000):
        expected = block.get_signature(shingles[:count])
        assert module._in_parts(block.get_signature)(shingles[:count]) == expected


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ([], [0, 1, 2, 3]),
        ([(3, 1), (1, 3), (1, 3)], [0, 1, 2, 1]),
        ([(2, 3), (0, 2)], [0, 1, 0, 0]),
        ([(3, 2), (2, 1), (1, 0)], [0, 0, 0, 0]),
    ],
)
def test_label_is_the_smallest_connected_node(edges, expected):
    firsts, seconds = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    assert smallest_labels(4, firsts, seconds).tolist() == expected
    assert len(smallest_labels(0, firsts[:0], seconds[:0])) == 0


def test_options():
    assert near_duplicates(None) is None and near_duplicates("{}") == NearDuplicates()
    assert near_duplicates("{hashes_per_bucket: 8}") == NearDuplicates(hashes_per_bucket=8)
    with pytest.raises(ValueError, match=r"^near_dedup=\{rows: 3\}: options must be among n_grams, .* Fix: "):
        near_duplicates("{rows: 3}")
    with pytest.raises(ValueError, match=r"^near_dedup: num_buckets=0: must be .* at least 1\. Fix: "):
        near_duplicates("{num_buckets: 0}")
