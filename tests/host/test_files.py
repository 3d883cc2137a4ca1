import os
import re

import pytest

from helpers import ROOT
from moe_exp.host import quantities
from moe_exp.host.files import bytes_text, count_text, read_json, read_yaml


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (45.6e6, "45.6 MB"), (999.6e6, "1 GB"),
        (999.4e6, "999 MB"), (1.75e12, "1.75 TB"), (1.75e15, "1.75 PB"), (2.1e18, "2.1 EB"),
        (1.5e24, "1,500,000 EB"), (-1.75e12, "-1.75 TB"),
    ],
)  # fmt: skip
def test_bytes_have_a_unit_and_no_exponent(num_bytes, text):
    assert bytes_text(num_bytes) == quantities.bytes_text(num_bytes) == text
    assert quantities.bytes_text(float("nan")) == "–"


def test_quantities_round_before_they_choose_a_unit():
    numbers = (0, 512, 12_345, 4396160, 30.532e9, 999.7e6, 1e12)
    assert [count_text(number) for number in numbers] == ["0", "512", "12.3K", "4.4M", "30.5B", "1B", "1T"]
    counts = [quantities.count_text(number) for number in (999.96, 999_960, 2.5e18)]
    assert counts == ["1K", "1M", "2,500,000T"]
    assert [quantities.flops_text(number) for number in (2.5e18, 0)] == ["2.5E", "0"]
    durations = [quantities.duration(seconds) for seconds in (1.0404, 119, 200, 100_000)]
    assert durations == ["1.04 s", "119 s", "0:03:20", "1 day, 3:46:40"]


def test_no_other_place_writes_sizes():
    """1750 GB are 1.75 TB, whoever prints them."""
    divided = re.compile(r"/ 1(e6|e9|e12|0\*\*9)[^\n]*\b[kMGT]B\b")
    texts = {path: path.read_text() for path in (ROOT / "moe_exp").rglob("*.py")}
    found = [path for path, text in texts.items() if divided.search(text) or "filesize" in text]
    assert not found


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "maximum recursion depth exceeded"),
        (b"9" * 5000, "Exceeds the limit"),
        (b"\xff", "can't decode byte 0xff"),
        (b'{"a": ', "Expecting value"),
    ],
)
def test_damaged_json_is_one_line(content, reason, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read_json(path)
    with pytest.raises(ValueError, match=rf"^{path}: is damaged \(.*{reason}.*\)\. Fix: restore it\.$"):
        read_json(path, fix="restore it")


def test_yaml_and_files_of_other_kinds(tmp_path):
    (tmp_path / "a.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match=r"a\.yaml: is damaged"):
        read_yaml(tmp_path / "a.yaml", fix="restore it")
    (tmp_path / "a.yaml").write_text("? {a: [1]}\n: 2")  # a key that no dict takes
    with pytest.raises(ValueError, match="unhashable"):
        read_yaml(tmp_path / "a.yaml")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path)


def test_deep_yaml_is_refused_before_it_is_parsed(tmp_path):
    (tmp_path / "a.yaml").write_text("[" * 10**6)
    with pytest.raises(ValueError, match=r"brackets are nested more than 100 deep"):
        read_yaml(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("[" * 100 + "]" * 100 + "\n")
    assert str(read_yaml(tmp_path / "a.yaml")) == "[" * 100 + "]" * 100
