import json

import pytest

from moe_exp import cli

LAYOUT = {"gpus": 32, "tp": 1, "pp": 4, "ep": 8, "mbsz": 1, "gbsz": 64}
RUN = ["--preset=qwen3-30b-a3b", "--gpu=H100", *(f"--{name}={value}" for name, value in LAYOUT.items())]
MODEL = ["--preset=qwen3-30b-a3b", "--gpus=8", "--gbsz=256"]


@pytest.fixture
def call(no_settings, capsys):
    def run(*arguments):
        assert cli.main(["plan", *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_explain_draws_the_stages(call, tmp_path):
    printed = call("explain", *RUN, "--svg", str(tmp_path / "step.svg"))
    assert printed.count("stage ") == 4 and "% idle" in printed
    assert (tmp_path / "step.svg").read_text().count("<svg") == 1
    report = json.loads(call("explain", *RUN, "--json"))
    assert len(report["events"]) == 2 * 4 * 8 and report["seconds"] > 0


def test_roofline_names_what_bounds_a_part(call):
    parts = {part["name"]: part for part in json.loads(call("roofline", *RUN, "--json"))}
    assert parts["experts"]["bound"] == "compute" and parts["norms"]["bound"] == "memory"
    # gate, up and down projection of eight experts of 4096 tokens: 6 * 4096 * 8 * 3 * 2048 * 768
    assert parts["experts"]["flops"] == 6 * 4096 * 8 * 3 * 2048 * 768
    assert all(0 < part["peak_share"] < 1 for part in parts.values() if part["flops"])
    assert "of peak" in call("roofline", *RUN)


def test_published_runs_next_to_a_case(call):
    runs = json.loads(call("nearest", *RUN, "--top", "5", "--json"))
    assert len(runs) == 5 and runs[0]["model"] == "Qwen3-30B-A3B" and "H100" in runs[0]["gpu"]
    assert [run["distance"] for run in runs] == sorted(run["distance"] for run in runs)
    assert "measured s" in call("nearest", *RUN, "--top", "2")


def test_devices_beside_each_other(call):
    arguments = ["compare-hardware", *MODEL, "--devices", "H100, B200", "--prices", "H100=2,B200=40"]
    found = {one["gpu"]: one for one in json.loads(call(*arguments, "--json"))}
    h100, b200 = found["H100-80GB"], found["B200-180GB"]
    assert list(found) == ["H100-80GB", "B200-180GB"]  # the cheaper one first
    assert b200["tokens_per_second"] > h100["tokens_per_second"] > 0
    assert h100["price_per_trillion"] == pytest.approx(2 * h100["hours_per_trillion"])
    assert "B200-180GB" in call(*arguments, "--tp", "2")
    fixed = json.loads(call(*arguments, "--tp", "2", "--json"))
    assert all(one["layout"].startswith("TP2,") for one in fixed)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nearest", *RUN, "--top", "0"], "TOP=0: must be at least 1"),
        (["explain", *RUN, "--svg", "/dev/null"], "SVG=/dev/null: exists and is not a regular file"),
        (["roofline", *RUN, "--price", "3"], "PRICE=3: has no effect here"),
        (["compare-hardware", *MODEL, "--prices", "H100"], "PRICES=H100: must be DEVICE=PRICE"),
        (
            ["compare-hardware", *MODEL, "--prices", "A100=1"],
            "PRICES=A100=1: A100-80GB is not among --devices",
        ),
        (["explain", "--preset", "reference", "--gpus", "8", "--tp", "16"], "GPUS_PER_NODE=8: 8 ranks"),
        (["roofline", "--preset", "reference", "--gpus", "6", "--tp", "3"], "TP=3: must divide"),
        (["compare-hardware", *RUN], "GPU=H100: has no effect here"),
    ],
)
def test_refusals(arguments, line, capsys):
    assert cli.main(["plan", *arguments]) == 1
    assert line in capsys.readouterr().err
