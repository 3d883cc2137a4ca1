"""Removes duplicates with datatrove: finds sets of duplicates in several passes, then keeps one of each set.

A hash of the text finds exact duplicates. MinHash finds near-duplicates in three passes: signatures, pairs,
clusters. Two texts whose word n-grams have the Jaccard similarity s become a pair with the
probability 1 - (1 - s^rows)^buckets; each bucket has `rows` hashes (Broder 1997; Leskovec, Rajaraman,
Ullman, Mining of Massive Datasets, 3.4). Each cluster keeps its longest text; if several are equally long, it
keeps the one with the smallest hash. The result thus depends only on the documents, not on the number of
tasks or the order of files. datatrove's own cluster step instead prefers documents with many pairs, and needs
a Python object per document.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import yaml
from numpy.typing import NDArray

from moe_exp.data.convert.filters import Filter, word_tokenizer
from moe_exp.data.execution import complete_files, task_stats
from moe_exp.data.kinds import input_error
from moe_exp.host.files import read_json, write_json
from moe_exp.host.processes import allow_open_files

# One entry per document with a signature, in the order of the documents.
_RANK = np.dtype([("num_chars", "<u4"), ("hash", "<u8")])
_SHINGLES_AT_ONCE = 1024  # 1 MB of hashes
_LINES_AT_ONCE = 1024  # signatures per read; datatrove's default is 5
_CLUSTERS_SHOWN, _MEMBERS_SHOWN, _SAMPLE_CHARS = 20, 4, 1000
# Words are separated by spaces. In scripts without spaces, every character is a word.
_WORD = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]|[^\\s\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)


def run_block(build: Callable[[], Any], data: Any, rank: int, world_size: int) -> Any:
    """Builds a datatrove block in the task's process, runs it there and returns its statistics."""
    allow_open_files()
    block = build()
    block.run(data, rank, world_size)
    return block.stats


# Exact duplicates


def exact_block(name: str, *folders: str, **options: Any) -> Any:
    """Builds the datatrove block `name`: ExactDedupSignature, ExactFindDedups or ExactDedupFilter.

    The 64-bit hashes of n different texts collide with probability n^2 / 2^65: 3e-6 for ten million
    documents, 0.03 for a billion.
    """
    from datatrove.pipeline.dedup import exact_dedup

    for folder in folders:
        Path(folder).mkdir(parents=True, exist_ok=True)  # datatrove creates none without duplicates
    # newer versions of xxhash do not accept str
    config = exact_dedup.ExactDedupConfig(content_getter=lambda document: document.text.encode())
    return getattr(exact_dedup, name)(*folders, config=config, **options)


# Near-duplicates


@dataclass(frozen=True)
class NearDuplicates:
    """Parameters of MinHash near-duplicate detection, see the module's docstring.

    The defaults find 99.5% of pairs with a similarity of 0.9, 72% at 0.8 and 0.7% at 0.5. FineWeb's 14
    buckets of 8 hashes find 92% at 0.8 and 5% at 0.5.
    """

    n_grams: int = 5  # words per shingle; shorter texts are never removed
    num_buckets: int = 14
    hashes_per_bucket: int = 11
    seed: int = 1  # of the hash functions

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < (name != "seed"):
                rule = f"{name}={value}: must be a whole number of at least {int(name != 'seed')}"
                fix = f"use, for example, the default {getattr(type(self), name)}"
                raise input_error("near_dedup", rule, fix)

    def config(self) -> Any:
        from datatrove.pipeline.dedup.minhash import MinhashConfig

        return MinhashConfig(self.n_grams, self.num_buckets, self.hashes_per_bucket, self.seed)


def near_duplicates(given: str | Mapping[str, Any] | None) -> NearDuplicates | None:
    """Parses the option near_dedup of a command line or YAML file; ValueError if it is invalid."""
    if given is None:
        return None
    options: Any = given
    if isinstance(given, str):
        try:
            options = yaml.safe_load(given) or {}
        except yaml.YAMLError:
            options = None
    known = list(NearDuplicates.__dataclass_fields__)
    if not isinstance(options, Mapping) or set(options) - set(known):
        rule = f"options must be among {', '.join(known)}"
        raise input_error(f"near_dedup={given}", rule, "write, for example, '{hashes_per_bucket: 8}'")
    return NearDuplicates(**options)


def sign_near_duplicates(how: NearDuplicates, folder: str, data: Any, rank: int, world_size: int) -> Any:
    """Last step of the first pass: writes each document's MinHash signature, length and hash."""
    from datatrove.pipeline.dedup import MinhashDedupSignature

    tokenizer = word_tokenizer(_WORD.findall)
    block = MinhashDedupSignature(f"{folder}/signatures", how.config(), language=tokenizer)
    # newer versions of xxhash do not accept str
    block._hash_func = lambda ngram: xxhash.xxh3_64_intdigest(ngram.encode())
    block.get_signature = _in_parts(block.get_signature)
    with complete_files([Path(folder, "ranks", f"{rank:05d}")]) as (path,), path.open("wb") as file:

        def ranked() -> Iterator[Any]:
            for document in data:
                digest = xxhash.xxh3_64_intdigest(f"{document.text}\0{document.id}".encode())
                file.write(np.array([(len(document.text), digest)], dtype=_RANK).tobytes())
                yield document

        block.run(ranked(), rank, world_size)
    return block.stats


def _in_parts(signature: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes `signature` work in chunks, because datatrove keeps the hashes of all shingles in memory."""

    def in_parts(shingles: Any) -> Any:
        starts = range(0, len(shingles), _SHINGLES_AT_ONCE)
        parts = [signature(shingles[start : start + _SHINGLES_AT_ONCE]) for start in starts]
        # the minimum of the parts' minima is the minimum over all shingles
        return np.array(parts, dtype=np.uint64).min(axis=0).tolist()

    return in_parts


def pair_near_duplicates(how: NearDuplicates, folder: str) -> Any:
    """Second pass: MinhashDedupBuckets, with one task per bucket."""
    from datatrove.pipeline.dedup import MinhashDedupBuckets

    folders = f"{folder}/signatures", f"{folder}/pairs"
    return MinhashDedupBuckets(*folders, config=how.config(), lines_to_buffer=_LINES_AT_ONCE)


def cluster_near_duplicates(folder: str, num_tasks: int, *_: Any) -> Any:
    """Third pass, in a single task: writes lists of the documents that MinhashDedupFilter will remove."""
    files = sorted(Path(folder, "pairs").iterdir())
    pairs = np.concatenate([np.fromfile(path, "<u4") for path in files]).reshape(-1, 2).astype(np.uint64)
    # np.unique is much faster for numbers than for rows: join (task, position) in one number
    found = pairs[:, 0] << np.uint64(32) | pairs[:, 1]  # task of a document, and its position there
    nodes, of_pairs = np.unique(found, return_inverse=True)
    order = _by_preference(folder, nodes)
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    ends = position[of_pairs.reshape(-1, 2)]
    # nodes are numbered by preference: each cluster keeps its smallest node
    labels = smallest_labels(len(nodes), ends[:, 0], ends[:, 1])
    nodes = nodes[order]
    removed = Path(folder, "removed")
    removed.mkdir(exist_ok=True)
    goes = labels != np.arange(len(labels))
    for task in range(num_tasks):
        mine = goes & (nodes >> np.uint64(32) == np.uint64(task))
        places = np.sort(nodes[mine] & np.uint64(2**32 - 1))
        places.astype("<u4").tofile(removed / f"{task:06d}.remove")
    # samples for the user: some removed documents next to the one that is kept
    clusters = np.unique(labels[goes])
    shown = [nodes[labels == one][:_MEMBERS_SHOWN].tolist() for one in clusters[:_CLUSTERS_SHOWN].tolist()]
    write_json(Path(folder, "shown.json"), shown)
    stats = task_stats("🫂 - DEDUP: clusters")
    stats["clusters"].update(len(clusters))
    stats["to_remove"].update(int(goes.sum()))
    return stats


def _by_preference(folder: str, nodes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Order of the nodes (documents): longest text first; among equally long texts, smallest hash first."""
    ranks = np.empty(len(nodes), dtype=_RANK)
    tasks = (nodes >> np.uint64(32)).astype(np.int64)
    for task in np.unique(tasks).tolist():
        mine = tasks == task
        of_task = np.memmap(Path(folder, "ranks", f"{task:05d}"), dtype=_RANK, mode="r")
        ranks[mine] = of_task[(nodes[mine] & np.uint64(2**32 - 1)).astype(np.int64)]
    return np.lexsort((ranks["hash"], np.uint32(2**32 - 1) - ranks["num_chars"]))


def smallest_labels(
    num_nodes: int, firsts: NDArray[np.int64], seconds: NDArray[np.int64]
) -> NDArray[np.int64]:
    """For each node, the smallest node in its component. Edge i connects `firsts[i]` and `seconds[i]`."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(firsts), bool), (firsts, seconds)), shape=(num_nodes, num_nodes))
    _, components = connected_components(edges, directed=False)
    smallest: NDArray[np.int64] = np.unique(components, return_index=True)[1]
    return smallest[components]


def near_filter(folder: str) -> Any:
    """MinhashDedupFilter, which keeps one document of each cluster."""
    from datatrove.pipeline.dedup import MinhashDedupFilter

    return MinhashDedupFilter(f"{folder}/removed", lines_to_buffer=_LINES_AT_ONCE)


@dataclass
class NearDuplicateFilter(Filter):
    """Filter that runs `near_filter`. Its samples show each kept document next to removed ones."""

    folder: str

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        shown = {
            node & (2**32 - 1): (cluster, number)
            for cluster, nodes in enumerate(read_json(Path(self.folder, "shown.json")))
            for number, node in enumerate(nodes)
            if node >> 32 == rank
        }
        samples = []

        def sampled() -> Iterator[Any]:
            for place, document in enumerate(data):
                if place in shown:
                    cluster, number = shown[place]
                    sample = {"filter": self.name, "cluster": cluster, "stays": not number, "id": document.id}
                    samples.append(sample | {"text": document.text[:_SAMPLE_CHARS]})
                yield document

        yield from super().__call__(sampled(), rank, world_size)
        self.samples = samples
