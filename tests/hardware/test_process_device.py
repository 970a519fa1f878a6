"""Which arithmetic a device gets, and what it is measured to use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stoker.errors import CannotRun
from stoker.hardware import process_device as device_module
from stoker.hardware.process_device import (
    Device,
    check_devices,
    choose_device,
    device_address,
    device_of,
    move_to,
    processor_name,
    widest_float,
)
from stoker.hardware.processor import has_cuda_driver


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize(("units", "precision"), [(True, "bf16"), (False, "fp32")])
@pytest.mark.usefixtures("no_gpu")
def test_a_processor_gets_bf16_only_with_units_for_it(
    units: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "has_bf16_matrix_units", lambda: units)
    chosen = choose_device()
    assert (chosen.type, chosen.precision) == ("cpu", precision) and "bfloat16" in chosen.why


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_without_bf16_gets_fp16(native: bool, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native)
    assert choose_device().precision == precision


@pytest.mark.usefixtures("no_gpu")
def test_what_is_given_is_taken() -> None:
    assert choose_device("fp16") == Device("cpu", "fp16", "given")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrix_products_are_in_the_chosen_precision(precision: str, dtype: torch.dtype) -> None:
    with Device("cpu", precision, "").autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_apples_gpus_get_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    assert widest_float(torch.device("mps")) == torch.float32
    cpu, wide = torch.device("cpu"), torch.ones(2, dtype=torch.float64)
    assert move_to(wide, cpu) is wide
    monkeypatch.setattr(device_module, "widest_float", lambda _: torch.float32)
    assert move_to(wide, cpu).dtype == torch.float32
    assert move_to(torch.ones(2, dtype=torch.int64), cpu).dtype == torch.int64


@pytest.mark.slow
def test_peak_memory_sees_what_was_allocated() -> None:
    """Measures in a process of its own: the peak of this one may lie far above what it has now."""
    code = (
        "import numpy as np; from stoker.hardware.process_device import Device, peak_resident\n"
        "before = peak_resident()\n"
        "block = np.ones(2**29, dtype=np.uint8)\n"
        "after = Device('cpu', 'fp32', '').peak_memory()\n"
        "del block\n"
        "print(after - before, peak_resident() - after)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, later = map(float, run.stdout.split())
    assert 0.45 < grown < 0.55 and later > -0.01  # half a GiB, and a peak stays


def test_the_processor_has_a_name() -> None:
    assert processor_name().strip()


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
def test_each_process_gets_its_gpu() -> None:
    assert [device_of(rank).index for rank in range(4)] == [0, 1, 2, 3]
    assert [device_of(rank, [0, 2]) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 2)]
    check_devices([0, 3], 2)
    check_devices(None, 4)
    with pytest.raises(CannotRun, match=r"parallel\.devices: 4 is requested, and this machine has 4 GPUs, numbered"):
        check_devices([0, 4], 2)
    with pytest.raises(CannotRun, match="needs 8 processes with a GPU each, and this machine has 4"):
        check_devices(None, 8)


def test_a_process_whose_launcher_shows_it_one_gpu_takes_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of(3) == torch.device("cuda", 0)


@pytest.mark.usefixtures("no_gpu")
def test_processes_without_gpus_share_the_processor() -> None:
    check_devices(None, 64)
    assert device_of(5) == torch.device("cpu")
    with pytest.raises(CannotRun, match="this machine has no GPU"):
        check_devices([0], 1)


@pytest.mark.parametrize("file", ["/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/kfd"])
def test_drivers_of_both_makers_are_found(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == file)
    assert has_cuda_driver()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert not has_cuda_driver()


def test_the_address_of_a_gpu_is_written_as_its_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=27, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    assert device_address(torch.device("cuda", 3)) == "0000:1b:00" and device_address(torch.device("cpu")) == ""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert device_address(torch.device("cuda", 3)) == ""
