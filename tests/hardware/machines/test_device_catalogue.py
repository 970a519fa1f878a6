"""The catalogue of devices: published ratios, and names however they are written."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from stoker.errors import UserError
from stoker.hardware.machines.device_catalogue import CATALOGUE
from stoker.hardware.machines.device_names import device_kind


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100", "A100-80GB-SXM"),
        ("a100 40gb", "A100-40GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("A800-80GB", "A800-80GB-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("NVIDIA H100 NVL", "H100-94GB-NVL"),
        ("h100_96gb", "H100-96GB-SXM"),
        ("Tesla V100-SXM2-32GB", "V100-32GB-SXM2"),
        ("RTX4090", "RTX4090-24GB"),
        ("NVIDIA GeForce RTX 3090", "RTX3090-24GB"),
        ("NVIDIA RTX A6000", "A6000-48GB"),
        ("B200-SXM", "B200-180GB-SXM"),
        ("B200 192GB", "B200-180GB-SXM"),
        ("NVIDIA B300 SXM6 AC", "B300-270GB-SXM"),
        ("GB200 NVL72", "GB200-186GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("H100-96GB-HBM2e-500W", "H100-96GB-SXM"),
        ("H100-80GB-HBM2e", "H100-80GB-PCIe"),
        ("MI355X OAM 288GB HBM3E", "MI355X-288GB"),
        ("cpu", "CPU"),
    ],
)
def test_a_name_may_be_written_as_the_driver_or_a_reader_writes_it(written: str, name: str) -> None:
    assert device_kind(written).name == name


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.name)
def test_every_device_is_found_by_its_own_name_and_says_where_its_figures_are_from(kind) -> None:  # type: ignore[no-untyped-def]
    assert device_kind(kind.name) is kind
    assert kind.source


@pytest.mark.parametrize(
    ("written", "near"),
    [("H101", "H100"), ("hl00", "H100"), ("A100-400GB", "A100-40GB-SXM"), ("H100 banana", "H100-80GB-SXM")],
)
def test_an_unknown_name_is_answered_with_the_nearest(written: str, near: str) -> None:
    with pytest.raises(UserError, match=f"`{written}` is not a device of the catalogue; write .*{near}"):
        device_kind(written)


@pytest.mark.parametrize(
    ("written", "name", "memory", "bandwidth", "power"),
    [
        ("A100-64GB", "A100-64GB-SXM", 0.8 * 79.2, 1631, 1.0),  # four stacks of 408 GB/s instead of five
        ("H100-80GB-SXM-500W", "H100-80GB-SXM-500W", 79.1, 3350, 500 / 700),
        ("H100 80GB SXM HBM2e", "H100-80GB-SXM-HBM2e", 79.1, 2000, 1.0),
        ("H100-80GB 2.4TB/s", "H100-80GB-SXM-2400GBps", 79.1, 2400, 1.0),
    ],
)
def test_the_nearest_device_takes_what_a_name_states_otherwise(
    written: str, name: str, memory: float, bandwidth: float, power: float
) -> None:
    found = device_kind(written)
    assert (found.name, found.memory_gbs, found.power) == (name, bandwidth, pytest.approx(power))
    assert found.memory_gib == pytest.approx(memory, abs=0.01)
    assert found.like in {kind.name for kind in CATALOGUE} and found.peak_tflops == device_kind(found.like).peak_tflops
    assert device_kind(found.name) == found


@pytest.mark.parametrize("kind", [k for k in CATALOGUE if not k.is_cpu], ids=lambda kind: kind.name)
def test_each_narrower_precision_is_faster(kind) -> None:  # type: ignore[no-untyped-def]
    peaks = [kind.peak(precision) for precision in ("fp32", "tf32", "fp16", "fp8", "fp4")]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("kind", [k for k in CATALOGUE if not k.is_cpu], ids=lambda kind: kind.name)
def test_memory_is_about_what_the_name_says(kind) -> None:  # type: ignore[no-untyped-def]
    named = re.search(r"(\d+)GB", kind.name)
    assert named is not None
    assert 0.89 < kind.memory_gib / int(named[1]) <= 1.0


def test_what_a_device_lacks_is_done_in_the_next_wider_precision() -> None:
    assert device_kind("V100").peak("bf16") == 15.7e12
    assert device_kind("A100").peak("fp8") == 312e12
    assert device_kind("H100").peak("fp4") == device_kind("H100").peak("fp8") == 1978.9e12
    with pytest.raises(UserError, match="`bf17` is not a precision"):
        device_kind("A100").peak("bf17")


def test_generations_keep_their_published_ratios() -> None:
    a100, a800, h100 = device_kind("A100"), device_kind("A800"), device_kind("H100")
    assert h100.link_gbs / a100.link_gbs == 1.5
    assert a800.link_gbs / a100.link_gbs == pytest.approx(2 / 3)
    assert device_kind("H800").link_gbs == 200
    assert device_kind("B200").link_gbs == 2 * h100.link_gbs
    assert device_kind("A100-40GB").peak("bf16") == a100.peak("bf16")
    assert h100.peak("fp8") / h100.peak("bf16") == pytest.approx(2, rel=1e-3)


def test_a_cluster_is_described_without_pytorch() -> None:
    code = (
        "import sys; from stoker.hardware.machines.cluster_file import load_cluster; "
        "load_cluster('4x8xH100'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
