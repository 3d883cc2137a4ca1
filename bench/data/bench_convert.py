"""Parquet to JSONL: `moe-exp data prepare`'s conversion against plain datatrove and a bare pyarrow + orjson
loop.

    # 60 MB of the standard library's sources in web-page-sized documents; a minute
    python bench/data/bench_convert.py
    python bench/data/bench_convert.py --mb 500

Every program runs as a process of its own, one task, turn by turn; CPU is user + system of the whole process
and its children, the median of the rounds; memory is the peak of the largest process. All write the same
lines. Ours also checks every row, counts and hashes the texts, reads the chunk back, and hashes it.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from moe_exp.data.download.sources import python_stdlib_documents

PLAIN = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.writers import JsonlWriter
if __name__ == "__main__":
    source, output = sys.argv[1:]
    writer = JsonlWriter(output, output_filename="x.chunk.${rank}.jsonl", compression=None)
    pipeline = [ParquetReader(source), writer]
    LocalPipelineExecutor(pipeline, tasks=1, workers=1, logging_dir=output + "/datatrove").run()
"""
BARE = """
import pathlib, sys
import orjson
import pyarrow.parquet as pq
source, output = map(pathlib.Path, sys.argv[1:])
output.mkdir()
with (output / "x.chunk.00000.jsonl").open("wb") as lines:
    for path in sorted(source.iterdir()):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1000):
                for row in batch.to_pylist():
                    line = {"text": row.pop("text"), "id": row.pop("id"), "metadata": row}
                    lines.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
"""
OURS = """
import sys
from pathlib import Path
from moe_exp.data.convert.convert import ConvertSettings, convert
from moe_exp.data.execution import Execution
if __name__ == "__main__":
    files, output = sorted(Path(sys.argv[1]).iterdir()), Path(sys.argv[2]) / "x"
    convert(files, output, ConvertSettings(tasks=1), Execution(workers=1))
"""
# A process between, so that the peak of its children is that of one program.
RUNNER = """
import resource, subprocess, sys
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
subprocess.run(sys.argv[1:2] + ["-c"] + sys.argv[2:], check=True, **quiet)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
PROGRAMS = {"plain datatrove": PLAIN, "pyarrow + orjson loop": BARE, "ours": OURS}
DOCUMENT_CHARS = 4000


def write_source(folder: Path, num_bytes: int) -> tuple[int, int]:
    """Parquet with the columns of fineweb-edu. Returns documents and bytes of text."""
    folder.mkdir()
    pieces = [
        (path, text[start : start + DOCUMENT_CHARS])
        for path, text in python_stdlib_documents()
        for start in range(0, len(text), DOCUMENT_CHARS)
    ]
    rows, size = [], 0
    while size < num_bytes:
        for path, text in pieces:
            number = len(rows)
            row = {
                "text": text,
                "id": f"<urn:uuid:{number:032x}>",
                "dump": "CC-MAIN-2019-30",
                "url": f"https://example.org/{number}/{path}",
            }
            row |= {
                "file_path": f"s3://crawl/{path}",
                "language": "en",
                "language_score": 0.5 + number % 499 / 1000,
            }
            rows.append(
                row | {"token_count": len(text) // 4, "score": 2.5 + number % 17 / 16, "int_score": 3}
            )
            size += len(text.encode())
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=1000)
    return len(rows), size


def measure(program: str, source: Path, output: Path) -> tuple[float, float]:
    """CPU seconds, and peak resident MB."""
    command = [sys.executable, "-c", RUNNER, sys.executable, program, str(source), str(output)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    seconds, kilobytes = done.stdout.split()[-2:]
    return float(seconds), float(kilobytes) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_documents, num_bytes = write_source(folder / "source", arguments.mb * 10**6)
        found: dict[str, list[tuple[float, float]]] = {program: [] for program in PROGRAMS}
        lines: set[bytes] = set()
        for turn in range(arguments.rounds):
            for program, code in PROGRAMS.items():
                output = folder / f"{turn} {program}"
                found[program].append(measure(code, folder / "source", output))
                lines.add(next(output.rglob("*.jsonl")).read_bytes())
                shutil.rmtree(output)
        assert len(lines) == 1, "the programs do not write the same"
        print(f"{num_documents:,} documents, {num_bytes / 1e6:.0f} MB of text, {arguments.rounds} rounds\n")
        print("| program | CPU s | to plain datatrove | to the loop | peak MB |\n|---|---|---|---|---|")
        cpu = {program: statistics.median(seconds for seconds, _ in runs) for program, runs in found.items()}
        for program, runs in found.items():
            ratios = (
                f"{cpu[program] / cpu['plain datatrove']:.2f} |"
                f" {cpu[program] / cpu['pyarrow + orjson loop']:.2f}"
            )
            print(f"| {program} | {cpu[program]:.2f} | {ratios} | {max(memory for _, memory in runs):.0f} |")


if __name__ == "__main__":
    main()
