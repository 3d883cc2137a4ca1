"""SLURM jobs of a conversion, run for real on a small stand-in for the cluster."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from moe_exp.data.convert.convert import ConvertSettings, convert
from moe_exp.data.convert.steps import ReadFiles
from moe_exp.data.execution import Execution, Pass, in_turn
from moe_exp.data.jobs import ray_executor
from moe_exp.data.shuffle.shuffle import shuffle_documents

pytest.importorskip("datatrove")


FINISH = """
import sys
from pathlib import Path
from moe_exp.data.convert.convert import ConvertSettings, convert
from moe_exp.data.execution import Execution
inputs, output, dedup = [Path(one) for one in sys.argv[3:]], Path(sys.argv[1]), sys.argv[2] == "dedup"
assert convert(inputs, output, ConvertSettings(dedup=dedup), Execution("slurm", partition="cpu")) is not None
"""


def make_inputs(folder: Path, num_files: int = 2) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{index}.jsonl" for index in range(num_files)]
    for index, path in enumerate(paths):
        documents = ({"text": f"{number % 7} {index % 2}", "n": number} for number in range(20))
        path.write_bytes(b"".join(orjson.dumps(document) + b"\n" for document in documents))
    return paths


def slurm(output: Path, inputs: list[Path], dedup: str = "all") -> Execution:
    finish = (sys.executable, "-c", FINISH, str(output), dedup, *map(str, inputs))
    return Execution("slurm", partition="cpu", workers=5, sbatch=("account=mine",), finish_command=finish)


def contents(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / "manifest.json").read_text())
    names = ("settings", "inputs", "read", "filtered", "written", "tasks", "outputs")
    facts = {name: manifest[name] for name in names}
    return {path.name: path.read_bytes() for path in folder.glob("*.jsonl")} | facts


def test_jobs_are_submitted_once_resumed_and_published_by_the_last(tmp_path, cluster):
    inputs, output = make_inputs(tmp_path / "in"), tmp_path / "x"
    execution = slurm(output, inputs)
    assert convert(inputs, output, ConvertSettings(), execution) is None
    assert cluster.jobs() == ["100", "101", "102"]  # the tasks, the merging of their stats, the publishing
    options = cluster.options("100")
    wanted = {"array": "0-1%5", "partition": "cpu", "account": "mine", "job-name": "x"}
    assert wanted.items() <= options.items()
    depends = [cluster.options(job)["dependency"] for job in ("101", "102")]
    assert depends == ["afterok:100", "afterok:100:101"]

    # While they are there, nothing is submitted twice, and nothing thrown away.
    assert convert(inputs, output, ConvertSettings(), execution) is None
    for where, start_over in ((execution, True), (Execution(workers=1), False)):
        with pytest.raises(ValueError, match=r"SLURM jobs are still using it\. Fix: scancel 100 101 102, or"):
            convert(inputs, output, ConvertSettings(), where, start_over=start_over)
    assert len(cluster.jobs()) == 3

    cluster.run(lost={("100", 1)})
    assert [(cluster.folder / f"{job}.end").read_text() for job in cluster.jobs()] == ["failed"] * 3
    assert not output.exists()
    with pytest.raises(ValueError, match=r"x: was started with tasks=2, not 1\. Fix: "):
        convert(inputs, output, ConvertSettings(tasks=1), execution)

    assert convert(inputs, output, ConvertSettings(), execution) is None
    assert cluster.options("103")["array"] == "0-0%5"
    assert json.loads((tmp_path / "x.partial/datatrove/ranks_to_run.json").read_text()) == [1]
    cluster.run()
    outcomes = {job: (cluster.folder / f"{job}.end").read_text() for job in ("103", "104", "105")}
    assert set(outcomes.values()) == {"ok"}, [path.read_text() for path in cluster.folder.glob("*.out")]
    assert not (tmp_path / "x.partial").exists()

    convert(inputs, tmp_path / "local/x", ConvertSettings(), Execution(workers=1))
    assert contents(output) == contents(tmp_path / "local/x")
    assert convert(inputs, output, ConvertSettings(), execution)["written"]["num_documents"] == 40
    assert len(cluster.jobs()) == 6


def test_inside_a_job_nothing_is_submitted(tmp_path, cluster, monkeypatch):
    inputs, output = make_inputs(tmp_path / "in"), tmp_path / "x"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(ValueError, match=r"^executor=slurm: a job cannot resubmit its 2 remaining tasks"):
        convert(inputs, output, ConvertSettings(), slurm(output, inputs))
    assert not cluster.jobs()


def test_a_queue_that_does_not_answer_is_no_empty_queue(tmp_path, cluster):
    inputs, output = make_inputs(tmp_path / "in"), tmp_path / "x"
    execution = slurm(output, inputs)
    assert convert(inputs, output, ConvertSettings(), execution) is None
    cluster.replace("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(
        ValueError, match=r"^squeue: exit code 1: slurm_load_jobs error: Unable .* Fix: try again"
    ):
        convert(inputs, output, ConvertSettings(), execution)
    assert len(cluster.jobs()) == 3
    cluster.replace("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert convert(inputs, output, ConvertSettings(), execution) is None
    assert len(cluster.jobs()) == 6


def test_jobs_that_are_refused(tmp_path, cluster):
    inputs, output = make_inputs(tmp_path / "in"), tmp_path / "x"
    for program, rule in (
        ("exit 3", "failed with exit code 3"),
        ("echo done", r"printed no job id: 'done\\n'"),
    ):
        cluster.replace("sbatch", program)
        with pytest.raises(ValueError, match=f"^sbatch: {rule}"):
            convert(inputs, output, ConvertSettings(), slurm(output, inputs))


@pytest.mark.slow
def test_passes_of_deduplication_depend_on_each_other(tmp_path, cluster):
    inputs, output = make_inputs(tmp_path / "in", 3), tmp_path / "x"
    assert convert(inputs, output, ConvertSettings(dedup=True), slurm(output, inputs, "dedup")) is None
    # Three passes, each with the merging of its stats, and the publishing.
    depends = [cluster.options(job).get("dependency", "").removeprefix("afterok:") for job in cluster.jobs()]
    assert depends == ["", "100", "100", "102", "102", "104", "100:101:102:103:104:105"]
    cluster.run()
    assert output.is_dir(), [path.read_text() for path in cluster.folder.glob("*.out")]
    convert(inputs, tmp_path / "local/x", ConvertSettings(dedup=True), Execution(workers=1))
    assert contents(output) == contents(tmp_path / "local/x")
    assert json.loads((output / "manifest.json").read_text())["written"]["num_documents"] == 14


def test_a_pass_does_not_begin_before_the_one_before_it_is_complete(tmp_path):
    first, second = in_turn([Pass([], 3, tmp_path / "a"), Pass(["step"], 2, tmp_path / "b")])
    assert list(first.pipeline) == [] and second.pipeline[1:] == ["step"]
    done = tmp_path / "a/completions"
    done.mkdir(parents=True)
    for task in (0, 2):
        (done / f"{task:05d}").touch()
    with pytest.raises(ValueError, match=r"^1 tasks of the previous pass .* \(first: task 1\)\. Fix: see"):
        second.pipeline[0]()
    (done / "00001").touch()
    assert second.pipeline[0]() is None


def test_ray_is_datatroves_executor(tmp_path):
    reader = ReadFiles(str(tmp_path), ["a.jsonl"], 3, tmp_path / "through")
    # executor="ray" would need the package
    execution = Execution(workers=2, cpus_per_task=2, mem_per_cpu_gb=8)
    executor = ray_executor(Pass([reader], 3, tmp_path / "logs"), execution)
    assert (type(executor).__name__, executor.world_size, executor.workers) == ("RayPipelineExecutor", 3, 2)
    assert (executor.cpus_per_task, executor.mem_per_cpu_gb) == (2, 8)


@pytest.mark.parametrize("executor", ["slurm", "ray"])
def test_an_executor_that_is_not_there(executor, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fix = {"slurm": "run the command on a login node", "ray": "pip install ray"}[executor]
    with pytest.raises(ValueError, match=f"^executor={executor}: .*Fix: {fix}"):
        Execution(executor, partition="cpu")


@pytest.fixture(scope="module")
def on_ray():
    """A Ray cluster on this machine."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield Execution("ray", workers=2, mem_per_cpu_gb=1)
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_tasks_on_ray_make_the_same_or_are_named(tmp_path, on_ray):
    inputs, settings = make_inputs(tmp_path / "in"), {"name": "x", "num_shards": 3, "memory_bytes": 2**24}
    made = {}
    for name, execution in (("here", Execution(workers=1)), ("ray", on_ray)):
        shuffle_documents(inputs, tmp_path / f"{name}_shuffled", **settings, tasks=3, execution=execution)
        convert(inputs, tmp_path / name / "x", ConvertSettings(dedup=True), execution)
        paths = [*(tmp_path / f"{name}_shuffled").glob("*.jsonl"), *(tmp_path / name / "x").glob("*.jsonl")]
        made[name] = {path.name: path.read_bytes() for path in paths}
    assert made["ray"] == made["here"]
    inputs[0].write_text('{"text": "one"}\n{"no": 1}\n')
    with pytest.raises(ChildProcessError, match=r"1 of 1 tasks failed or were lost.*task_00000\.log"):
        convert(inputs[:1], tmp_path / "fails", ConvertSettings(), on_ray)
