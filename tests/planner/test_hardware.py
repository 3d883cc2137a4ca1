import json

import pytest

from moe_exp.planner.hardware import PROFILES, hardware_names, load_hardware


def test_short_names_and_nodes_that_nvlink_connects():
    assert load_hardware("H100") == load_hardware("H100-80GB")
    assert load_hardware("V100").gpus_per_node == 4 and load_hardware("A100").num_units == 108
    assert [load_hardware(name).link_domain(4) for name in ("GB200", "GB300", "V100")] == [72, 72, 4]
    assert load_hardware("B300").link_domain(8) == 8


@pytest.mark.parametrize("name", hardware_names())
def test_every_number_has_a_source(name):
    content = json.loads((PROFILES / f"{name}.json").read_text())
    assert content.pop("name") == name and content.pop("architecture")
    assert all(set(entry) == {"value", "source"} and entry["source"] for entry in content.values())
    hardware = load_hardware(name)
    assert hardware.name == name and set(hardware.dense_flops) - {"fp8", "fp4"} == {"fp32", "bf16", "fp16"}


def test_a_profile_by_path(tmp_path):
    content = json.loads((PROFILES / "A100-80GB.json").read_text())
    content["name"], content["num_units"]["value"] = "A100-40GB", 107
    (tmp_path / "mine.json").write_text(json.dumps(content))
    assert load_hardware(str(tmp_path / "mine.json")).num_units == 107


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"GPU=A1000: unknown device. Fix: use one of A100-80GB, "):
        load_hardware("A1000")
    path = tmp_path / "mine.json"
    for text, rule in (
        ('{"name": "X", "architecture": "ampere"}', "memory_bytes is missing"),
        ("{", "is damaged"),
        ('"name"', "must contain a JSON object"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"mine.json: {rule}.* Fix: "):
            load_hardware(str(path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dense_flops", 3e14), ("dense_flops", {"bf16": 1e15}),
        ("dense_flops", {"fp32": 1e13, "fp16": 1e14, "bf16": -1e15}),
        ("node_bytes_per_second", float("inf")), ("memory_bytes", True), ("num_units", 1.5),
        ("num_units", {"value": -1, "source": "x"}), ("name", 5), ("architecture", "pascal"),
    ],
)  # fmt: skip
def test_values_that_are_none(tmp_path, field, value):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(json.loads((PROFILES / "A100-80GB.json").read_text()) | {field: value}))
    with pytest.raises(ValueError, match=rf"mine.json: {field}=.*: must "):
        load_hardware(str(path))
