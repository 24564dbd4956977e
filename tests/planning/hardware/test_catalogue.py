"""Claims on how a kind of device is found."""

import pytest

from tailrace.planning.hardware.catalogue import catalogue, device_called


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA RTX A4000", None),
        ("Tesla T4", None),
        ("this machine's CPU", None),
    ],
)
def test_a_device_is_known_by_what_its_driver_calls_it(name: str, kind: str | None) -> None:
    found = device_called(name)
    assert found == (None if kind is None else (kind, catalogue()[kind]))
