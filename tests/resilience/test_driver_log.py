"""Xid messages of NVIDIA's driver: read from the kernel's log, told apart, and mapped to processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stoker.job import load_job
from stoker.launch import worker
from stoker.launch.run_spec import RunSpec
from stoker.resilience import driver_log
from stoker.resilience.driver_log import DriverLog, Xid, gpu_faults, read_addresses, xid_of
from stoker.runs.shared_memory import shared_memory
from stoker.runs.shm_folder import has_folder

A, B, C = "0000:1b:00", "0000:43:00", "0000:9c:00"
JOB = """
task: module
module: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}
steps: 2
train: {batch: 4}
"""
RESET = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the only programs of a machine that has NVIDIA's driver."""
    monkeypatch.setattr(driver_log, "has_nvidia_driver", lambda: True)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    program(tmp_path, "dmesg", "exit 1")
    program(tmp_path, "journalctl", "exit 1")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.", Xid(A, 79)),
        ("node1 kernel: NVRM: Xid (PCI:0000:1B:00): 13, pid='<unknown>', name=<unknown>, Graphics", Xid(A, 13)),
        ("NVRM: Xid (0000:1b:00): 14, Channel 00000001", Xid(A, 14)),
        ("NVRM: Xid (PCI:0000:1b:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9)", Xid(A, 94)),
        ("NVRM: Xid (PCI:0000:1b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception", Xid(A, 13)),
        ("NVRM: Xid (PCI:0008:01:00): 154, " + RESET, Xid("0008:01:00", 154, "GPU Reset Required")),
        (
            "NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (\x1b[2J)",
            Xid(A, 154),
        ),
        ("NVRM: GPU at PCI:0000:1b:00: GPU-b850f46d-d5ea-c752-ddf3-c4453e44d3f7", None),
        ("NVRM: Xid (PCI:0000:1b:zz): 79, ", None),
        ("NVRM: Xid (PCI:0000:1b:00): 99999999999999, ", None),
        ("NVRM: Xid (PCI:0000:1b:00", None),
    ],
)
def test_a_line(line: str, message: Xid | None) -> None:
    assert xid_of(line) == message


@pytest.mark.parametrize(
    ("codes", "kind", "lost"),
    [
        ([13, 13, 45], "application", False),
        ([31], "application", False),
        ([79], "bus", True),
        ([48], "memory", True),
        ([48, 63, 94, 45], "contained", False),  # the ECC error has harmed one process
        ([48, 94, 95], "memory", True),
        ([63], "notice", False),
        ([64], "memory", True),
        ([74], "link", True),
        ([119, 45], "firmware", True),
        ([9999], "unknown", False),
    ],
)
def test_what_codes_mean_for_a_device(codes: list[int], kind: str, lost: bool) -> None:
    messages = [Xid(A, code) for code in codes]
    (fault,) = gpu_faults([*messages, Xid(C, 13)], {0: B, 1: A})  # C is another user's
    assert (fault.rank, fault.kind, fault.lost) == (1, kind, lost)
    assert fault.codes == tuple(dict.fromkeys(codes)) and f"Xid {codes[0]} (" in fault.problem.message


def test_the_driver_knows_better_than_the_catalogue() -> None:
    for code, action, lost in ((31, "Node Reboot Required", True), (48, "None", False), (94, "Drain and Reset", True)):
        (fault,) = gpu_faults([Xid(A, code), Xid(A, 154, action)], {0: A})
        assert fault.lost is lost and f"the driver asks for: {action}" in fault.problem.message
    (fault,) = gpu_faults([Xid(A, 154, "GPU Reset Required"), Xid(A, 154, "None"), Xid(A, 31)], {0: A})
    assert not fault.lost  # its last word counts


def test_an_error_of_a_link_blames_neither_end_nor_the_neighbours_of_a_lost_device() -> None:
    devices = {0: A, 1: B}
    assert not any(fault.lost for fault in gpu_faults([Xid(A, 74), Xid(B, 74)], devices))
    faults = gpu_faults([Xid(A, 79), Xid(B, 74), Xid(B, 45)], devices)
    assert [fault.lost for fault in faults] == [True, False]


def test_only_messages_from_now_on_are_read(machine: Path) -> None:
    old = "[   12.000001] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."
    (machine / "log").write_text(f"[    0.000000] Linux version 6.8\n{old}\n")
    program(machine, "dmesg", f"cat {machine}/log")
    log = DriverLog()
    assert log.read() == []
    with (machine / "log").open("ab") as file:
        file.write(b"\xff\xfe broken\n[   99.5] \x1b[31mNVRM: Xid (PCI:0000:43:00): 31, pid=7, name=\x1b]0;x\x07\n")
    assert log.read() == [Xid(B, 31)]
    assert log.read() == []


@pytest.mark.parametrize("dmesg", ["echo 'read kernel buffer failed' >&2; exit 1", "exec sleep 60", None])
def test_where_dmesg_is_refused_slow_or_missing_the_journal_is_read(
    machine: Path, monkeypatch: pytest.MonkeyPatch, dmesg: str | None
) -> None:
    monkeypatch.setattr(driver_log, "SECONDS", 0.5)
    monkeypatch.setenv("PATH", str(machine))
    (machine / "cat").symlink_to("/bin/cat")
    (machine / "sleep").symlink_to("/bin/sleep")
    program(machine, "dmesg", dmesg) if dmesg else (machine / "dmesg").unlink()
    (machine / "log").write_text("[    0.000000] node1 kernel: Linux version 6.8\n")
    program(machine, "journalctl", f"cat {machine}/log")
    begun = time.monotonic()
    log = DriverLog()
    assert log.read() == [] and time.monotonic() - begun < 10
    with (machine / "log").open("a") as file:
        file.write("[  123.456789] node1 kernel: NVRM: Xid (PCI:0000:1b:00): 119, pid=1, Timeout\n")
    assert log.read() == [Xid(A, 119)]


def test_a_log_that_cannot_be_read(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(machine, "journalctl", "exit 0")  # as it answers who may not read the journal: nothing, and no error
    assert DriverLog().read() is None
    monkeypatch.setattr(driver_log, "has_nvidia_driver", lambda: False)  # other makers' devices
    assert DriverLog().read() == []


def test_a_process_of_a_supervisor_writes_the_address_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "device_address", lambda _: A)
    (tmp_path / "job.yaml").write_text(JOB)
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")
    with worker._mesh(spec, None):  # without one, there is no folder
        assert not has_folder(spec.output)
    with shared_memory(spec.output) as shared, worker._mesh(spec, None):
        assert read_addresses(shared.path, range(3)) == {0: A}
