from __future__ import annotations

import pytest

from moe_exp.host.files import bytes_text
from moe_exp.report import quantities


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


def test_no_number_of_bytes_is_a_dash():
    assert quantities.bytes_text(float("nan")) == "–"
