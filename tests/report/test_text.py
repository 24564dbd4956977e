import pytest

from tailrace.registers.metrics import metric
from tailrace.report.text import duration, interval, number, percent, signed_percent, write, write_change


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "0"), (3.0, "3"), (1234567, "1,234,567"), (0.00123, "0.00123"), (12.345, "12.3"), (1e-6, "1e-06"),
     (1234.5, "1,234"), (-0.5, "-0.5"), (float("nan"), "nan"), (float("inf"), "inf")],
)  # fmt: skip
def test_number_keeps_three_digits(value: float, written: str) -> None:
    assert number(value) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (65, "1 min 05 s"),
     (3599.7, "1 h 00 min"), (3725, "1 h 02 min"), (90000, "25 h 00 min")],
)  # fmt: skip
def test_duration_carries_over_when_it_rounds(seconds: float, written: str) -> None:
    assert duration(seconds) == written


def test_a_fraction_is_written_in_percent_and_its_change_in_points() -> None:
    assert write(metric("accuracy"), 0.125) == percent(0.125) == "12.5 %"
    assert (write_change(metric("accuracy"), 0.025), write_change(metric("reward"), -0.5)) == ("+2.5 points", "-0.5")


def test_changes_keep_three_digits_however_small() -> None:
    assert signed_percent(0.0125) == "+1.25 %"
    assert signed_percent(-0.000012) == "-0.0012 %"
    assert interval(-0.005, 0.105) == "-0.5 to +10.5 %"
