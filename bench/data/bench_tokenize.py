"""Tokenizing a JSONL file into .bin/.idx with one worker: CPU seconds and memory against datatrove and a
plain encode_batch loop.

    python bench/data/bench_tokenize.py                                # 50 MB, about 5 minutes
    python bench/data/bench_tokenize.py --megabytes 500 --keep /tmp/bench_tokenize \\
        --vocab /tmp/bench_tokenize/tokenizer.json

The corpus is real text with no repeats, as repeats would flatter caches: first the standard library's
sources, then .py, .rst, .md, .txt, .h, .html and .js files of installed packages and of the system, each
content once, files over 1 MB and files that quote the end-of-text token left out (the peers read it as such).
A file is a document. The BPE of 100,000 tokens is trained on the first 60 MB of it.

Every peer is a process of its own, from start to end, imports and loading the tokenizer included: CPU seconds
are user + system, memory is the peak resident set. One thread each (TOKENIZERS_PARALLELISM=false,
RAYON_NUM_THREADS=1). The tokens of all are compared byte by byte.
"""

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import orjson
from rich.console import Console

from moe_exp.data.tokens.tokenizer_training import EOD_TOKEN, train_bpe

SUFFIXES = (".py", ".rst", ".md", ".txt", ".h", ".html", ".js")
LARGEST_FILE_BYTES = 10**6
TRAINING_BYTES = 60 * 10**6
VOCAB_SIZE = 100_000
PEERS = ("ours, gigatoken", "ours, tokenizers", "encode_batch loop", "datatrove")
BARS = {  # CPU of the second over CPU of the first: at least, or for the last at most
    "datatrove / ours, gigatoken": 12.0,
    "encode_batch loop / ours, gigatoken": 20.0,
    "ours, tokenizers / encode_batch loop": 1.1,
}


class Result(NamedTuple):
    cpu_seconds: float
    peak_megabytes: float
    sha256: str


def texts(num_bytes: int) -> Iterator[str]:
    """Real text, every content once, until there are `num_bytes` of it."""
    roots = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        "/usr/lib",
        "/usr/share",
        "/usr/include",
        "/usr/src",
    ]
    seen: set[bytes] = set()
    total = 0
    for root in roots:
        for folder, subfolders, names in os.walk(root):
            subfolders.sort()
            for name in sorted(names):
                path = Path(folder) / name
                if (
                    not name.endswith(SUFFIXES)
                    or path.is_symlink()
                    or not 0 < path.stat().st_size <= LARGEST_FILE_BYTES
                ):
                    continue
                content = path.read_bytes()
                digest = hashlib.blake2b(content, digest_size=16).digest()
                if digest in seen or EOD_TOKEN.encode() in content:
                    continue
                seen.add(digest)
                try:
                    yield content.decode()
                except UnicodeDecodeError:
                    continue
                total += len(content)
                if total >= num_bytes:
                    return


def make_corpus(path: Path, num_bytes: int) -> None:
    with path.open("wb") as file:
        for text in texts(num_bytes):
            file.write(orjson.dumps({"text": text, "metadata": {"bytes": len(text)}}) + b"\n")


def encode_batch_loop(corpus: Path, tokenizer_path: Path, output: Path) -> None:
    """What one writes in ten minutes."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    eod = tokenizer.token_to_id(EOD_TOKEN)
    with corpus.open("rb") as lines, output.with_suffix(".bin").open("wb") as file:
        batch: list[str] = []

        def write() -> None:
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                file.write(np.array([*encoding.ids, eod], dtype=np.int32).tobytes())
            batch.clear()

        for line in lines:
            batch.append(orjson.loads(line)["text"])
            if len(batch) == 1000:
                write()
        write()


def datatrove(corpus: Path, tokenizer_path: Path, output: Path) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    folder = output.with_name("datatrove")
    tokenize = MegatronDocumentTokenizer(
        str(folder), tokenizer_name_or_path=str(tokenizer_path), eos_token=EOD_TOKEN, batch_size=1000
    )
    reader = JsonlReader(str(corpus.parent), glob_pattern=corpus.name)
    LocalPipelineExecutor(
        [reader, tokenize], tasks=1, workers=1, logging_dir=str(folder / "logs"), skip_completed=False
    ).run()
    (folder / "00000_tokens.bin").replace(output.with_suffix(".bin"))


def ours(backend: str, corpus: Path, tokenizer_path: Path, output: Path) -> int:
    from moe_exp.commands.data import main

    prefix = str(output).removesuffix("_text_document")
    arguments = [
        "--input",
        str(corpus),
        "--output-prefix",
        prefix,
        "--append-eod",
        "--workers",
        "1",
        "--backend",
        backend,
        "--start-over",
    ]
    return main(
        "tokenize",
        [*arguments, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer_path)],
    )


def run_peer(peer: str, corpus: Path, tokenizer_path: Path, folder: Path) -> Result:
    output = folder / f"{PEERS.index(peer)}_text_document"
    command = [sys.executable, __file__, "--child", peer, str(corpus), str(tokenizer_path), str(output)]
    one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, env={**os.environ, **one_thread}, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{peer}: exit code {process.returncode}, see {log.name}")
    with output.with_suffix(".bin").open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**22):
            digest.update(chunk)
    return Result(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, digest.hexdigest())


def child(peer: str, corpus: Path, tokenizer_path: Path, output: Path) -> int:
    if peer.startswith("ours"):
        return ours(peer.partition(", ")[2], corpus, tokenizer_path, output)
    {"encode_batch loop": encode_batch_loop, "datatrove": datatrove}[peer](corpus, tokenizer_path, output)
    return 0


def report(results: dict[str, Result], num_bytes: int) -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in ("tokenizers", "gigatoken", "datatrove"))
    print(
        f"\n{num_bytes / 1e6:.0f} MB of JSONL, BPE of {VOCAB_SIZE:,} tokens, one worker,"
        f" {platform.machine()}; {versions}\n"
    )
    print("| | CPU seconds | MB/s | peak MB |\n|---|---:|---:|---:|")
    for peer, result in results.items():
        print(
            f"| {peer} | {result.cpu_seconds:.1f} | {num_bytes / 1e6 / result.cpu_seconds:.1f} |"
            f" {result.peak_megabytes:.0f} |"
        )
    print("\n| CPU ratio | measured | bar |\n|---|---:|---:|")
    for ratio, bar in BARS.items():
        over, under = ratio.split(" / ")
        if over in results and under in results:
            sign = "<=" if bar < 2 else ">="
            print(
                f"| {ratio} | {results[over].cpu_seconds / results[under].cpu_seconds:.2f} | {sign} {bar} |"
            )
    if len(results) > 1:
        same = (
            "are the same, byte by byte"
            if len({result.sha256 for result in results.values()}) == 1
            else "DIFFER"
        )
        print(f"\nThe tokens of all {same}.")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], *map(Path, sys.argv[3:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=50, help="of text (default: %(default)s)")
    parser.add_argument("--vocab", type=Path, help="tokenizer.json to use instead of training one")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument(
        "--keep", type=Path, help="folder for corpus, tokenizer and outputs, kept (default: a temporary one)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        corpus = folder / f"corpus_{arguments.megabytes:g}.jsonl"
        console = Console(stderr=True)
        if not corpus.exists():
            console.log("collecting the corpus")
            make_corpus(corpus, int(arguments.megabytes * 1e6))
        tokenizer_path = arguments.vocab or folder / "tokenizer.json"
        if not tokenizer_path.exists():
            console.log("training the BPE")
            train_bpe(texts(min(TRAINING_BYTES, int(arguments.megabytes * 1e6))), VOCAB_SIZE).save(
                str(tokenizer_path)
            )
        results = {}
        for peer in arguments.peers:
            console.log(peer)
            results[peer] = run_peer(peer, corpus, tokenizer_path, folder)
        report(results, corpus.stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
