"""Shuffle and merge of JSONL against GNU shuf, cat, and terashuf with split: CPU seconds of whole processes
and peak memory.

    python bench/data/bench_shuffle.py          # 500 MB of real text, budget 256 MB: 1 to 2 min, 2 GB of disk
    python bench/data/bench_shuffle.py --megabytes 50 --rounds 5

The text is the Python standard library's sources again and again, one document per file, or with --characters
N cut into pages of N. Each program is a process of its own, interpreter and imports included; CPU is user +
system of all its threads and children (RUSAGE_CHILDREN, median of the rounds, which go through the programs
turn by turn). Peak memory is that of the largest process.

Before each program as much memory as the largest takes, files included, is touched and freed. A virtual
machine gives freed memory back to its host, and its first use after that costs up to ten times a copy:
without this, it would be paid by whoever comes at the wrong time. terashuf
(https://github.com/alexandres/terashuf) is measured where it is on PATH; it needs `MEMORY` in GB, and `split`
for the shards.

What they do is not the same. shuf holds all of the file, and writes one; so does terashuf, within its memory.
Ours parses and checks every document, counts and hashes texts and lines, sets validation documents aside,
writes 32 shards and reads them back. With --tasks a process per 512 MB does so; the budget is that of each.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from moe_exp.data.download.sources import python_stdlib_documents

MOE_EXP = [sys.executable, "-m", "moe_exp", "data"]
SHUFFLE = "moe-exp data shuffle"
MERGE = "moe-exp data merge"
NUM_TASKS = (2, 4)


def write_text(path: Path, num_bytes: int, characters: int) -> int:
    """Writes at least `num_bytes` of documents and returns how many there are."""
    documents = list(python_stdlib_documents())
    count = written = 0
    with path.open("wb") as file:
        while written < num_bytes:
            for name, text in documents:
                for first in range(0, len(text), characters or len(text) or 1):
                    page = text[first : first + (characters or len(text))]
                    metadata = {
                        "file_path": name,
                        "language": "en",
                        "language_score": 0.97,
                        "token_count": len(page) // 4,
                    }
                    line = {"text": page, "id": f"<urn:uuid:{count}>", "metadata": metadata}
                    written += file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                    count += 1
                if written >= num_bytes:
                    break
    return count


def measure(command: str | list[object], warm_bytes: int, **environment: str) -> tuple[float, float]:
    """CPU seconds and peak MB of a process and its children, in a child of ours, whose children are these
    alone.
    """
    subprocess.run([sys.executable, "-S", "-E", "-c", f"bytearray(b'x') * {warm_bytes}"], check=True)
    code = """
import json, resource, subprocess, sys
done = subprocess.run(json.loads(sys.argv[1]), shell=sys.argv[2] == "shell", capture_output=True)
if done.returncode:
    sys.exit(done.stderr.decode())
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
    words = command if isinstance(command, str) else [str(word) for word in command]
    shell = "shell" if isinstance(command, str) else "no"
    # -S -E: a small process, as a child's peak starts with its parent's size.
    program = [sys.executable, "-S", "-E", "-c", code, json.dumps(words), shell]
    done = subprocess.run(
        program, env={**os.environ, **environment}, check=True, capture_output=True, text=True
    )
    cpu, peak = done.stdout.split()
    return float(cpu), float(peak) / (2**20 if sys.platform == "darwin" else 2**10)


def one_round(folder: Path, memory: str) -> dict[str, tuple[float, float]]:
    """Every program once."""
    source, shards, one = folder / "text.jsonl", folder / "text_shuffled", folder / "one.jsonl"
    warm_bytes = 3 * source.stat().st_size
    figures = {"GNU shuf, no shards": measure(["shuf", source, "-o", one], warm_bytes)}
    one.unlink()
    ours = [*MOE_EXP, "shuffle", source, "--output", shards, "--name", "text", "--memory", memory]
    figures[SHUFFLE] = measure(ours, warm_bytes)
    shutil.rmtree(shards)
    for tasks in NUM_TASKS:
        figures[f"{SHUFFLE} --tasks {tasks}"] = measure([*ours, "--tasks", tasks], warm_bytes)
        if tasks != NUM_TASKS[-1]:
            shutil.rmtree(shards)
    if shutil.which("terashuf"):
        (folder / "split").mkdir(exist_ok=True)
        tera = f"terashuf < '{source}' > '{one}' && split -n l/32 '{one}' '{folder}/split/shard.'"
        figures["terashuf and split"] = measure(tera, warm_bytes, MEMORY="0.25", TMPDIR=str(folder))
        one.unlink()
        shutil.rmtree(folder / "split")
    flags = ["--input_dir", shards, "--valid_file_name", "text.val", "--output_file_name", "merged"]
    figures["cat"] = measure(f"cat '{shards}'/text.chunk.*.jsonl > '{one}'", warm_bytes)
    one.unlink()
    figures[MERGE] = measure([*MOE_EXP, "merge", *flags], warm_bytes)
    for path in (folder / "merged.jsonl", folder / "merged.manifest.json"):
        path.unlink()
    shutil.rmtree(shards)
    return figures


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--memory", default="256MB", help="budget of ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--characters", type=int, default=0, help="length of a document; 0: a whole file")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to work, on a disk with four times the text free; a temporary folder by default",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        count = write_text(folder / "text.jsonl", arguments.megabytes * 10**6, arguments.characters)
        print(
            f"{(folder / 'text.jsonl').stat().st_size / 1e6:.0f} MB, {count:,} documents, budget"
            f" {arguments.memory}\n"
        )
        figures: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for _ in range(arguments.rounds):
            for program, figure in one_round(folder, arguments.memory).items():
                figures[program].append(figure)
    print("| program | CPU seconds | all rounds | ratio to shuf or cat | peak MB |\n|---|---|---|---|---|")
    for program, rounds in figures.items():
        peer = "cat" if program in ("cat", MERGE) else "GNU shuf, no shards"
        ratios = [cpu / base for (cpu, _), (base, _) in zip(rounds, figures[peer], strict=True)]
        seconds = [cpu for cpu, _ in rounds]
        listed = " ".join(f"{cpu:.2f}" for cpu in seconds)
        peak = max(peak for _, peak in rounds)
        print(
            f"| {program} | {statistics.median(seconds):.2f} | {listed} | {statistics.median(ratios):.2f} |"
            f" {peak:.0f} |"
        )


if __name__ == "__main__":
    main()
