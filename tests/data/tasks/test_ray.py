"""Tasks on a Ray cluster that this test starts on this machine: the same chunks and shards."""

from __future__ import annotations

import importlib.util

import pytest

from data.shuffle.test_by_tasks import HERE, SETTINGS, data_of, some_inputs
from data.shuffle.test_shuffle import some_texts, write_jsonl
from moe_exp.data.convert.convert import ConvertSettings, convert
from moe_exp.data.convert.duplicates import NearDuplicates
from moe_exp.data.shuffle.shuffle import shuffle, shuffle_documents
from moe_exp.data.tasks.execution import Execution

pytest.importorskip("datatrove")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def execution():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield Execution("ray", workers=2, mem_per_cpu_gb=1)
    ray.shutdown()


def test_a_shuffle_on_ray(tmp_path, execution):
    inputs = some_inputs(tmp_path / "in")
    shuffle(inputs, tmp_path / "one", **SETTINGS)
    shuffle_documents(inputs, tmp_path / "ray", **SETTINGS, tasks=3, execution=execution)
    assert data_of(tmp_path / "ray") == data_of(tmp_path / "one")


def test_a_conversion_on_ray(tmp_path, execution):
    inputs = [write_jsonl(tmp_path / f"{number}.jsonl", some_texts(60, number)) for number in range(3)]
    settings = ConvertSettings(dedup=True, near_dedup=NearDuplicates(n_grams=2), min_chars=20)
    convert(inputs, tmp_path / "here/x", settings, HERE)
    convert(inputs, tmp_path / "ray/x", settings, execution)
    assert data_of(tmp_path / "ray/x") == data_of(tmp_path / "here/x")


def test_a_task_that_fails_on_ray_is_named(tmp_path, execution):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"no": 1}\n')
    with pytest.raises(ChildProcessError, match=r"task 0 of 1 failed or was lost.*task_00000\.log"):
        convert([tmp_path / "a.jsonl"], tmp_path / "x", ConvertSettings(), execution)
