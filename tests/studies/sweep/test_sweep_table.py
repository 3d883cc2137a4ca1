"""The table: what calibrate reads back, what people read, and what is predicted to be out of memory."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from moe_exp.config import load_config
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.hardware import load_hardware, profile_of
from moe_exp.planner.measured import read_runs
from moe_exp.planner.prediction import predict
from moe_exp.studies.sweep import table
from moe_exp.studies.sweep.driver import case_of
from moe_exp.studies.sweep.table import Row, by_rule, is_oom, to_csv, to_markdown

A100 = "NVIDIA A100-SXM4-80GB"
GIB = 2**30


def row(status, reason="", *, measured=(None, None), predicted=(None, None), **layout: object) -> Row:
    flags = {"preset": "reference", "gpus_per_node": "8"} | layout
    case = case_of(flags, Path("sweep"), local=False)
    reason = reason or " ".join(case.problems)
    return Row(case, status, reason, A100, profile_of(A100), *measured, *predicted)


def rows() -> list[Row]:
    return [
        row("ok", ep=4, measured=(0.5123456789, 33.25), predicted=(0.5, 32.0)),
        row("ok", ep=8, mbsz=4, measured=(0.25, 20.5)),
        row("rejected", ep=3, pp=5),
        row("oom", "CUDA out of memory", ep=2),
        row("failed", "a|b, \"c\"", ep=1),
        row("timeout", "late", tp=1, pp=2, vpp=2),
        row("predicted-oom", "needs 99.0 GiB", cp=2),
        row("left", etp=2),
    ]  # fmt: skip


def test_what_calibrate_reads_is_what_ran(tmp_path):
    (tmp_path / "sweep.csv").write_text(to_csv(rows(), "mine"))
    runs = read_runs(tmp_path / "sweep.csv")
    assert len(runs) == 8
    assert {run.section for run in runs} == {"mine"}
    for written, read in zip(rows(), runs, strict=True):
        assert read.row_id == written.case.name
        assert read.hardware.name == "A100-80GB"
        if written.status != "rejected":
            job = table.job_of(written.case.config, A100)
            assert replace(read.job, config=job.config) == job
            assert flops_per_iteration(read.job.config) == flops_per_iteration(job.config)
    assert [run.memory_gib for run in runs] == [33.25, 20.5, *[None] * 6]
    assert [run.seconds for run in runs] == [pytest.approx(0.5123456789, rel=1e-5), 0.25, *[None] * 6]
    assert [run.oom for run in runs] == [False, False, None, True, *[None] * 4]


def test_cells_of_the_table_that_people_share():
    lines = list(csv.DictReader(to_csv(rows(), "mine").splitlines()))
    first = lines[0]
    people = {
        "nodes": "1", "n_gpus": "8", "dp": "8", "tp": "1", "pp": "1", "ep": "4", "etp": "1", "cp": "1",
        "vpp": "none", "mbs": "8", "gbs": "64", "parameters": "4375732736", "mem_kind": "allocated",
        "predicted_mem_gb": "32", "predicted_sec_per_it": "0.5",
    }  # fmt: skip
    assert {name: first[name] for name in people} == people
    assert float(first["tflops"]) == pytest.approx(135_755_326_291_968 / 0.5123456789 / 8 / 1e12, rel=1e-5)
    assert [line["status"] for line in lines] == [one.status for one in rows()]
    for line in lines:
        assert line["use_mem"] == line["use_time"] == str(int(line["status"] == "ok"))
    assert all(line["mem_gb"] == line["sec_per_it"] == line["tflops"] == "" for line in lines[2:])
    assert "Fix: " in lines[2]["reason"]


def test_markdown_has_the_fastest_first_and_what_was_rejected_below():
    title, empty, head, ruler, *lines = to_markdown(rows(), "mine").splitlines()
    assert (title, empty) == ("# mine", "")
    lines, (blank, above, gap, rejected) = lines[:-4], lines[-4:]
    assert (blank, above[:9], gap) == ("", "Rejected,", "")
    assert rejected == "- EP: must divide NUM_EXPERTS: " + rows()[2].case.name
    heads = [cell.strip() for cell in head.strip("|").split("|")]
    assert len(set(heads)) == len(heads)
    assert {line.replace("\\|", "").count("|") for line in (head, ruler, *lines)} == {20}
    assert "| EP | ETP | CP | VPP | MBS |" in head
    cells = [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]
    assert [cell[-2] for cell in cells] == ["ok", "ok", "oom", "timeout", "failed", "predicted-oom", "left"]
    assert cells[0][:7] == ["1", "8", "4.38B", "8", "1", "1", "8"]
    assert cells[1][-7:-2] == ["33.25", "32.00", "0.5123", "0.5", "33.1"]
    assert cells[4][-1] == 'a/b, "c"'
    text = to_markdown([rows()[2]], "mine")
    assert "|" not in text and text.startswith("# mine\n\nRejected")


def test_rejected_cases_are_counted_by_the_rule_without_its_numbers():
    broken = [row("rejected", gpus_per_node=gpus, pp=pp, ep=1) for gpus, pp in ((1, 2), (2, 4), (2, 8))]
    found = by_rule([*rows()[:2], *broken, row("rejected", mbsz=3)])
    assert {rule: len(cases) for rule, cases in found.items()} == {
        "GPUS_PER_NODE: ranks (NNODES * GPUS_PER_NODE) must be a multiple of TP*PP*CP": 3,
        "GBSZ: must be a multiple of MBSZ*DP": 1,
    }


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        (A100, "A100-80GB"), ("NVIDIA A100 80GB PCIe", "A100-80GB"), ("NVIDIA A100-SXM4-40GB", ""),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-SXM2-16GB", ""), ("NVIDIA GeForce RTX 4090", ""), ("", ""),
    ],
)  # fmt: skip
def test_profiles_by_the_names_of_devices(device, profile):
    assert profile_of(device) == profile


def test_a_device_without_a_profile_is_named_by_the_reader(tmp_path):
    one = replace(rows()[0], device="Odd GPU", gpu="")
    (tmp_path / "sweep.csv").write_text(to_csv([one], "mine"))
    with pytest.raises(ValueError, match=r"row gpus_8.*, column gpu: GPU=Odd GPU: unknown device"):
        read_runs(tmp_path / "sweep.csv")


def test_out_of_memory_by_prediction():
    config = rows()[0].case.config
    # What the device has to hold decides, which is more than what is measured.
    job = replace(table.job_of(config, A100), measured_by="nvidia-smi")
    needed = predict(job, load_hardware("A100-80GB")).needed_bytes / GIB
    assert needed > predict(table.job_of(config, A100), load_hardware("A100-80GB")).needed_bytes / GIB
    assert (is_oom(config, A100, "A100-80GB") == "") == (needed <= 80)
    large = config.model_copy(update={"num_layers": 10 * config.num_layers})
    assert "A100-80GB has 80.0 GiB. Fix: set RUN_OOM=true" in is_oom(large, A100, "A100-80GB")
    assert is_oom(large, "unknown", "") == ""
    # processes on a CPU share its memory
    config = load_config({"preset": "cpu", "gpus_per_node": 1}, {})
    many = config.model_copy(update={"gpus_per_node": 64, "gbsz": 64 * config.gbsz})
    assert is_oom(config, "CPU", "CPU") == ""
    needed = 64 * predict(table.job_of(many, "CPU"), load_hardware("CPU")).needed_bytes / GIB
    assert is_oom(many, "CPU", "CPU").startswith(f"is predicted to need {needed:.1f} GiB, but CPU has ")


def test_picture(tmp_path):
    for number, chosen in enumerate((rows(), rows()[1:2])):
        path = tmp_path / f"{number}.png"
        assert table.draw_sweep(chosen, path, "mine")
        assert path.read_bytes().startswith(b"\x89PNG")
    assert not table.draw_sweep(rows()[2:], tmp_path / "none.png", "mine")
    assert not (tmp_path / "none.png").exists()
