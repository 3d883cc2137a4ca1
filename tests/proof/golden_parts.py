"""The parts of the golden record, see golden.py. A part yields names with lists: of numbers, or of lines."""

import argparse
import csv
import hashlib
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from helpers import ROOT
from helpers.checkpoint.legs import VOCAB, write_data
from helpers.docs.commands import whole_parser
from helpers.hf.tiny_models import MODELS, tiny_folder, weights_of
from helpers.slurm.cluster import Cluster
from helpers.warm_runs import answer_warm
from helpers.whole_runs import EndedRun, Runs
from moe_exp import cli
from moe_exp.checkpoint.format.torch_dist import CheckpointReader

OLD_RUN = Path(__file__).with_name("golden_run.tar.xz")
Entries = Iterator[tuple[str, list[Any]]]

# PRESET=cpu sets the rest. No two sizes are equal, and the learning rate moves at every step.
MODEL: dict[str, Any] = {
    "PRESET": "cpu", "NUM_LAYERS": 4, "HIDDEN_SIZE": 32, "FFN_HIDDEN_SIZE": 48, "MOE_FFN_HIDDEN_SIZE": 24,
    "NUM_HEADS": 4, "NUM_QUERY_GROUPS": 2, "SEQ_LEN": 16, "VOCAB_SIZE": VOCAB, "NUM_EXPERTS": 8, "TOPK": 2,
    "MBSZ": 2, "GBSZ": 8, "TRAIN_ITERS": 20, "WARMUP_ITERS": 5, "LR": 0.003, "MIN_LR": 0.0003, "SEED": 1234,
    "LOG_INTERVAL": 1, "EVAL_INTERVAL": 0, "NUM_WORKERS": 0, "DETERMINISTIC": True, "TRAIN_DATA": "tokens",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"USE_MOE": False},
    "moe": {"MOE_TYPE": "moe", "CAPACITY_FACTOR": 1.0, "OPTIMIZER": "adam", "SHARED_EXPERT_SIZE": 20},
    "dmoe": {"MOE_TYPE": "dmoe"},
}
LAYOUTS = {
    "one rank": {"GPUS_PER_NODE": 1},
    "DP2": {"GPUS_PER_NODE": 2},
    "TP2": {"GPUS_PER_NODE": 2, "TP": 2},  # sequence parallel
    "PP2 VPP2": {"GPUS_PER_NODE": 2, "PP": 2, "VPP": 2},
    "EP2": {"GPUS_PER_NODE": 2, "EP": 2},
    "CP2": {"GPUS_PER_NODE": 2, "CP": 2},
    "ETP2": {"GPUS_PER_NODE": 2, "ETP": 2},
}
# The run of golden_run.tar.xz, in the folder old.
OLD = {
    "NUM_LAYERS": 2, "HIDDEN_SIZE": 16, "FFN_HIDDEN_SIZE": 24, "MOE_FFN_HIDDEN_SIZE": 12, "NUM_HEADS": 2,
    "NUM_QUERY_GROUPS": 1, "NUM_EXPERTS": 4, "TRAIN_ITERS": 6, "EXIT_INTERVAL": 4, "GPUS_PER_NODE": 1,
    "TRAIN_DATA": "old/tokens", "RUN_DIR": "old", "RUN_NAME": "run",
}  # fmt: skip
# Keys of records whose values are measured.
_MEASURED = re.compile(r"time|seconds|_ms$|^ms_|per_second|tflops|memory|^made_at$|^id$")
_MOST_SECONDS = 1800.0  # of a run or a command, on a busy machine
_SETTINGS = re.compile(r"^Launch settings:\n.*?(?=^examples:|\Z)", re.DOTALL | re.MULTILINE)


class Place:
    """A folder for a part, with token files; `short` asks for the short form."""

    def __init__(self, folder: Path, *, short: bool):
        self.folder, self.short = folder, short
        write_data(folder)
        self.environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {
            "PYTHONPATH": str(ROOT), "COLUMNS": "100", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip

    def train(self, name: str, run_dir: str = "runs", **settings: Any) -> EndedRun:
        """A run to its end: by the script, or in the short form in forks."""
        runs = Runs(self.folder / run_dir, self.folder / "data", by_script=not self.short)
        given = {**MODEL, "TRAIN_DATA": self.folder / "tokens", "MASTER_PORT": 0, **settings}
        alone = {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
        return runs.succeed(name, tiny=False, timeout=_MOST_SECONDS, **given, **alone)

    def command(self, words: str, *, codes: tuple[int, ...] = (0,), **environ: Any) -> list[str]:
        """The lines that `moe-exp WORDS` prints, called in the folder; without progress."""
        given = self.environ | {name: str(value) for name, value in environ.items()}
        done = answer_warm(shlex.split(words), given, self.folder, timeout=_MOST_SECONDS)
        assert done.returncode in codes, f"moe-exp {words}: {done.returncode}\n{done.stdout}{done.stderr}"
        lines = self.lines(done.stdout + done.stderr)
        return [line for line in lines if not re.search(r" in [\d.:]+ s$", line)]

    def lines(self, text: str) -> list[str]:
        """Without what depends on the machine, the folder and the time."""
        python = Path(sys.executable)
        for words, name in (
            (self.folder, "FOLDER"), (python.with_name("moe-exp"), "PYTHON -m moe_exp"), (python, "PYTHON"),
            (python.parent, "BIN"), (ROOT, "ROOT"),  # an environment may lie in the checkout
        ):  # fmt: skip
            text = text.replace(str(words), name)
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
        text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+([+-]\d\d:?\d\d)?", "TIME", text)
        return [line.rstrip() for line in text.splitlines()]

    def file(self, path: Path | str) -> list[str]:
        """The lines of a file; of JSON the values by their paths, without those that are measured."""
        text = (self.folder / path).read_text()
        if str(path).endswith(".json"):
            text = "\n".join(f"{name}: {json.dumps(value)}" for name, value in _flat(json.loads(text)))
        return self.lines(text)

    def write_settings(self, name: str, settings: Mapping[str, Any]) -> None:
        """Writes a file for --config."""
        (self.folder / name).write_text("".join(f"{key}={value}\n" for key, value in settings.items()))


def train(place: Place) -> Entries:
    """Losses, gradient norms and the checkpoint of 20 iterations."""
    for kind, dtype, layout in [(k, d, name) for k in KINDS for d in ("fp32", "bf16") for name in LAYOUTS]:
        if kind == "dense" and layout in ("EP2", "ETP2"):
            continue
        # `run` has EP2, and other tests compare the layouts with one rank
        if place.short and (dtype != "fp32" or layout != "one rank"):
            continue
        name = f"{kind}/{dtype}/{layout}"
        done = place.train(re.sub(r"\W", "_", name), **KINDS[kind], **LAYOUTS[layout], DTYPE=dtype)
        for key in ("lm_loss", "grad_norm"):
            yield f"{name}/{key}", done.curve(key)
        yield f"{name}/checkpoint", [_hash("\n".join(_tensors(done.folder.path)))]


def run(place: Place) -> Entries:
    """All that a run writes: metrics.jsonl, summary, settings and every tensor of its checkpoint."""
    settings = {**LAYOUTS["EP2"], "TRAIN_ITERS": 4, "WARMUP_ITERS": 2, "EMA_DECAY": 0.9, "OPTIMIZER": "adam"}
    valid = {"VALID_DATA": place.folder / "tokens", "EVAL_INTERVAL": 2, "EVAL_ITERS": 1}
    done = place.train("run", **settings, **valid)
    for kind in ("train", "valid"):
        series: dict[str, list[Any]] = {}
        for record in done.records(kind):
            for key, value in _flat(record):
                series.setdefault(key, []).append(value)
        yield from ((f"metrics/{kind}/{key}", values) for key, values in series.items())
    events = [{**dict(_flat(record)), "bytes": None} for record in done.records("event")]
    yield "metrics/events", [json.dumps(event) for event in events]
    yield "summary", place.file(done.folder.summary)
    yield "config", place.file(done.folder.config)
    yield "checkpoint", _tensors(done.folder.path)


def old_run(place: Place) -> Entries:
    """A run of an earlier commit: described, converted and back, resumed, and reported on."""
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(place.folder, filter="data")
    yield "info", place.command("ckpt info old/run")
    yield "verify", place.command("ckpt verify old/run")
    yield "checkpoint", _tensors(place.folder / "old/run")
    for dtype in ("fp32", "bf16"):
        place.command(f"convert to-hf old/run hf_{dtype} --dtype {dtype}")
        place.command(f"convert from-hf hf_{dtype} back_{dtype}")
        yield from _converted(place, f"hf_{dtype}", f"back_{dtype}")
    yield "resume", place.command("train --resume old/run --exit-interval 0 --dry-run")
    changed = {"TRAIN_DATA": place.folder / "old/tokens", "RUN_DIR": place.folder / "old", "EXIT_INTERVAL": 0}
    done = place.train("run", "old", **{**OLD, **changed})
    for key in ("iteration", "lm_loss", "grad_norm"):
        yield f"resumed/{key}", done.curve(key)
    place.command("report old/run --out report.html")
    yield "report", re.findall(r"<h\d[^>]*>[^<]*", (place.folder / "report.html").read_text())


def families(place: Place) -> Entries:
    """Hugging Face folders of every family, to checkpoints and back."""
    for family in ("mixtral",) if place.short else MODELS:
        with redirect_stderr(io.StringIO()):  # progress
            tiny_folder(place.folder / family, family)
        place.command(f"convert from-hf {family} {family}_ckpt")
        place.command(f"convert to-hf {family}_ckpt {family}_back")
        yield from _converted(place, f"{family}_back", f"{family}_ckpt")


def _converted(place: Place, hf: str, checkpoint: str) -> Entries:
    weights = weights_of(place.folder / hf)
    yield f"{hf}/tensors", [_tensor_line(name, weights[name]) for name in sorted(weights)]
    yield f"{hf}/config.json", place.file(f"{hf}/config.json")
    yield f"{checkpoint}/tensors", _tensors(place.folder / checkpoint)
    yield f"{checkpoint}/settings.env", place.file(f"{checkpoint}/settings.env")


# Folders and prefixes with the words after `moe-exp data` that make them.
_SHUFFLE = "shuffle texts --name x --seed 3 --shards 4 --valid-fraction 0.05"
_TASKS, _BYTES = "--tasks 3 --workers 2", "--tokenizer-type ByteLevelTokenizer --append-eod"
_BPE = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tok --append-eod"
_FILTERS = "--dedup --near-dedup --min-chars 40 --filter pii"
DATA = {
    "shuffled": f"{_SHUFFLE} --output shuffled",
    "by_tasks": f"{_SHUFFLE} --output by_tasks {_TASKS}",
    "tok": "train-tokenizer texts --vocab-size 300 --out tok",
    "bytes": f"tokenize --input shuffled --output-prefix bytes {_BYTES}",
    "bytes_by_tasks": f"tokenize --input shuffled --output-prefix bytes_by_tasks {_BYTES} {_TASKS}",
    "bpe": f"tokenize --input texts --output-prefix bpe {_BPE}",
    "prepared": f"prepare texts --data-dir prepared --nchunks 2 --valid-fraction 0.05 {_FILTERS}",
}


def data(place: Place) -> Entries:
    """Shards, token files and manifests of a small corpus, in one process and by tasks."""
    _write_texts(place.folder / "texts")
    for name, words in DATA.items():
        printed = place.command(f"data {words}")
        yield f"{name}/printed", [re.sub(r" *\d[\d.,]* *", " N ", line) for line in printed]
        paths = [*place.folder.glob(f"{name}/**/*.json*"), *place.folder.glob(f"{name}_text_document.*")]
        for path in sorted(path for path in paths if "datatrove" not in path.parts):
            is_manifest = path.name.endswith("manifest.json")
            content = place.file(path) if is_manifest else [_hash(path.read_bytes())]
            yield str(path.relative_to(place.folder)), content


def _write_texts(folder: Path) -> None:
    """JSONL of 300 documents, some of which are the same or nearly so."""
    words = re.findall(r"\w+", "the router sends a token to few of many experts and the loss of it falls")
    folder.mkdir()
    for number in range(3):
        with (folder / f"{number}.jsonl").open("w") as file:
            for n in range(100 * number, 100 * number + 100):
                text = " ".join(words[(n * 7 + i * i * (n % 5 + 1)) % len(words)] for i in range(5 + n % 40))
                more = " 世界 mail@example.com" if n % 9 == 0 else ""
                file.write(json.dumps({"text": f"{n // 2} {text}{more}"}, ensure_ascii=False) + "\n")


def usage(place: Place) -> Entries:
    """`--help` of every command and script; the settings that many of them take are shown once."""
    texts = {" ".join(words): _help(words) for words in _commands(whole_parser())}
    settings = _SETTINGS.search(texts["train"])
    assert settings
    for name, text in texts.items():
        shown = text if name == "train" else text.replace(settings[0], "(the settings of moe-exp train)\n")
        yield f"moe-exp {name}".rstrip(), place.lines(shown)
    for path in sorted((ROOT / "moe_exp/scripts").glob("*.*")):
        program = "bash" if path.suffix == ".sh" else sys.executable
        if path.name != "environment.sh":
            words = [program, str(path), "--help"]
            done = subprocess.run(words, env=place.environ, capture_output=True, text=True, check=True)
            yield path.name, place.lines(done.stdout)


def _commands(parser: argparse.ArgumentParser, *words: str) -> Iterator[tuple[str, ...]]:
    yield words
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, chosen in action.choices.items():
                yield from _commands(chosen, *words, name)


def _help(words: tuple[str, ...]) -> str:
    shown = io.StringIO()
    with redirect_stdout(shown), suppress(SystemExit), patch.dict(os.environ, COLUMNS="100"):
        cli.main([*words, "--help"])
    return shown.getvalue()


_H100 = "--gpu H100-80GB --gpus 64 --gpus-per-node 8"
PRINTED = (
    "train --config tiny.env --dry-run",
    "compare --config tiny.env --runs moe,dmoe,dense --dry-run",
    "ladder --config tiny.env --sizes 16,24,32 --dry-run",
    "sweep --config tiny.env --gpus 2 --eps '1 2' --mbszs '1 2' --gpu H100-80GB --run-oom true --dry-run",
    f"plan --preset qwen3-30b-a3b --ep 8 {_H100}",
    f"plan --preset deepseek-v3-like --ep 64 {_H100} --json",
    "plan search --preset olmoe-1b-7b --gpu H100-80GB --gpus 16 --gbsz 256",
    f"plan explain --preset reference --pp 4 --gbsz 512 {_H100}",
    f"plan roofline --preset mixtral-8x7b --gbsz 512 {_H100}",
    "plan nearest --preset reference --gpus-per-node 8",
    "plan hardware",
)


def printed(place: Place) -> Entries:
    """What commands print that start nothing, and the hash of docs/settings.md."""
    place.write_settings("tiny.env", {**MODEL, **LAYOUTS["EP2"], "RUN_NAME": "x"})
    for words in PRINTED:
        yield words, place.command(words)
    yield "docs/settings.md", [_hash((ROOT / "docs/settings.md").read_bytes())]


_JOBS = "--executor slurm --partition cpu --tasks 3 --sbatch account=mine"
SBATCH = {
    "run": "slurm --config tiny.env --nnodes 2 --num-jobs 2 --extra-sbatch '--comment=\"a b\"'",
    "sweep": "sweep --config tiny.env --gpus 2 --eps 2 --executor slurm --sbatch=--partition=gpu",
    "shuffle": f"data shuffle texts --output shuffled {_JOBS}",
    "tokenize": f"data tokenize --input texts --output-prefix bytes {_BYTES} {_JOBS}",
    "prepare": f"data prepare texts --data-dir prepared --shuffle-tasks 2 {_JOBS}",
}


def sbatch(place: Place) -> Entries:
    """The batch scripts of runs, sweeps and data, with the arguments of sbatch."""
    _write_texts(place.folder / "texts")
    place.write_settings("tiny.env", {**MODEL, "GPUS_PER_NODE": 1, "RUN_NAME": "x"})
    for name, words in SBATCH.items():
        cluster = Cluster(place.folder / f"cluster_{name}")
        if name == "sweep":  # its jobs are gone at once, so that it ends
            cluster.replace("squeue", "true")
        path = f"{cluster.programs}:{os.environ['PATH']}"
        place.command(words, codes=(0, 1, 75), PATH=path, MODULES="cuda", RUN_OOM="true")
        for job in cluster.jobs():
            arguments = json.loads((cluster.folder / f"{job}.args").read_text())
            yield (
                f"{name}/{job}",
                [*place.lines("\n".join(arguments)), *place.file(cluster.folder / f"{job}.sh")],
            )


def studies(place: Place) -> Entries:
    """Results of a tiny comparison, ladder and sweep, without times."""
    own = ("TRAIN_ITERS", "WARMUP_ITERS")
    shared = {name: value for name, value in MODEL.items() if name not in own}
    place.write_settings("tiny.env", {**shared, "GPUS_PER_NODE": 1, "WARMUP_ITERS": 1})
    place.command("compare --config tiny.env --train-iters 4 --run-name compared")
    yield "compare/results", place.file("runs/compared/results.json")
    rows = [re.sub(r"[ -]+", " ", line) for line in place.file("runs/compared/report.md")]
    yield "compare/report", [row for row in rows if not re.search(r"time|training|tokens/s|memory", row)]
    if place.short:
        return
    sizes = "--sizes 16,24 --asymptote 1.5 --repeats 2"
    place.command(f"ladder --config tiny.env --train-iters 12 --run-name climbed {sizes}")
    yield "ladder", place.file("runs/climbed/ladder.json")
    lists = "--gpus 2 --eps '2 4' --sweep-iters 2 --sweep-warmup 1 --run-oom true"
    place.command(f"sweep --config tiny.env {lists} --sweep-name swept")
    for row in csv.DictReader((place.folder / "sweeps/swept/sweep.csv").read_text().splitlines()):
        kept = {key: value for key, value in row.items() if not re.search(r"sec_per|mem_gb|tflops", key)}
        yield f"sweep/{row['row_id']}", [f"{key}={value}" for key, value in kept.items()]


def _tensors(path: Path) -> list[str]:
    """A line for every tensor of the last checkpoint in a folder."""
    reader = CheckpointReader(sorted(path.glob("**/iter_*"))[-1])
    return [_tensor_line(key, reader.read(key)) for key in sorted(reader.tensors)]


def _tensor_line(name: str, tensor: torch.Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{name} {str(tensor.dtype)[6:]} {list(tensor.shape)} {_hash(content)}"


def _hash(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested records by their paths, without those that are measured."""
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield name, value
        return
    for key, one in value.items():
        if not _MEASURED.search(str(key)):
            yield from _flat(one, f"{name}.{key}".lstrip("."))


def make_run() -> None:
    """Writes golden_run.tar.xz, without what names this machine or only shows the run."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        shows = re.search(r"/(tensorboard|\.lock|[^/]*\.(log|png))$", entry.name)
        return None if shows else entry.replace(mtime=0, uid=0, gid=0, uname="", gname="", deep=False)

    with tempfile.TemporaryDirectory(prefix="golden_") as folder:
        place = Place(Path(folder), short=True)
        (place.folder / "old").mkdir()
        write_data(place.folder / "old")
        place.command("train", codes=(75,), **{**MODEL, **OLD})
        provenance = place.folder / "old/run/provenance.json"
        provenance.write_text("\n".join(place.lines(provenance.read_text())))
        with tarfile.open(OLD_RUN, "w:xz", preset=9) as archive:
            archive.add(place.folder / "old", "old", filter=plain)
    print(f"{OLD_RUN}: {OLD_RUN.stat().st_size} bytes")
