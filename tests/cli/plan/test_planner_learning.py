"""`stoker plan --calibrate`: what is measured of a machine is said, kept, and used by the next plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import main
from stoker.hardware.host_facts import HostFacts
from stoker.hardware.machines.detect_machine import this_processor
from stoker.hardware.measured.calibration import Calibration, Curve, MatmulTable, kept_calibration
from stoker.hardware.measured.nccl_settings import NcclHost, NcclSettings
from stoker.hardware.measured.planner_correction import Correction, keep, kept_corrections
from stoker.hardware.process_device import Device
from stoker.hardware.processor import processor_name
from stoker.launch import calibrate_machine


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["job.yaml", "--calibrate"], "job.yaml has no effect with --calibrate"),
        (["--calibrate", "--on", "8xH100"], "--on has no effect with --calibrate"),
        (["--calibrate", "--from", "runs/x"], "--from has no effect with --calibrate"),
        (["job.yaml", "--on", "8xH100", "--from", "runs/x"], "job.yaml has no effect with --from,"),
        (["--from", "runs/x", "--picture", "a.svg"], "--picture has no effect with --from,"),
        (["--from", "runs/x", "--seconds", "5"], "--seconds has no effect without --calibrate"),
        (["job.yaml", "--seconds", "5"], "--seconds has no effect without --calibrate"),
    ],
)
def test_arguments_without_effect_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\n")
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


CPU = Device("cpu", "fp32", "for a test")


class InThisProcess:
    """Stands for a pool of processes: one after the other here."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, function: Callable[..., Any], *arguments: Any, world: int, timeout: float) -> list[Any]:
        assert world <= self.size and timeout > 0
        if function is calibrate_machine.time_collectives:
            return [(Curve("all-reduce", (1024, 2**26), (1e-4, 0.1 * world), world),)] * world
        return [function(*arguments)] * world


def measured(seconds: float, *, device: Device, threads: int) -> Calibration:
    assert seconds > 0
    table = MatmulTable("fp32", (16, 256), tuple(2 * m * n * k / (threads * 5e10) for m in (16, 256)
                                                 for n in (16, 256) for k in (16, 256)))  # fmt: skip
    curves = (Curve("copy", (2**20, 2**28), (2**20 / 1e10, 2**28 / 1e10)), Curve("attention-32", (64,), (2e-3,)))
    return Calibration("2026-11-21", "here", processor_name(), threads, "2", (table,), curves, 4e-6)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("stoker.hardware.machines.detect_machine._visible_gpus", lambda: [])
    monkeypatch.setattr("stoker.hardware.measured.calibration._torch_version", lambda: "2")
    monkeypatch.setattr("stoker.hardware.machines.detect_machine.available_cores", lambda: 4)
    monkeypatch.setattr(calibrate_machine, "available_cores", lambda: 4)
    monkeypatch.setattr(calibrate_machine, "calibrate", measured)
    monkeypatch.setattr(calibrate_machine, "Pool", InThisProcess)


def test_a_processor_is_measured_as_it_is_divided(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--calibrate", "--seconds", "6"]) == 0
    shown = capsys.readouterr()
    assert "measuring rates of 2 processes with 2 threads: 2 s ..." in shown.err
    assert "fp32                      16: 200  256: 200" in shown.out  # GFLOP/s with four threads
    assert "copy                      1: 10  256: 10" in shown.out
    assert "attention-32              64: 2" in shown.out
    assert "operator call: at least 4.0 us" in shown.out
    assert "all-reduce of 4           100 us  0.168" in shown.out
    assert "NCCL settings are not searched: that needs two or more NVIDIA GPUs" in shown.out
    assert "later plans for this machine use it" in shown.out
    for processes, threads in ((1, 4), (2, 2), (4, 1)):
        kept = kept_calibration(processor_name(), threads)
        assert kept is not None and {curve.ranks for curve in kept.curves} == {1, 2, 4}
        cluster = this_processor(processes)
        assert cluster.calibration == kept
        assert cluster.device.peak("fp32") == pytest.approx(threads * 5e10)
        assert not any("measures this machine" in note for note in cluster.notes)


def test_a_plan_names_the_collectives_that_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\n")
    assert main(["plan", "--calibrate"]) == 0
    capsys.readouterr()
    said = "collectives inside a node are those measured between 2 and 4 processes on 2026-11-21"
    for on, named in (("2xcpu", True), ("1xcpu", False)):
        assert main(["plan", "job.yaml", "--on", on, "--json"]) == 0
        assert (said in json.loads(capsys.readouterr().out)["notes"]) is named


def test_collectives_of_gpus_are_measured_with_the_settings_of_nccl_that_were_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environments: list[dict[str, str]] = []

    class WithEnvironment(InThisProcess):
        def __init__(self, size: int, *, device: str, environment: dict[str, str]) -> None:
            super().__init__(size)
            assert device == "cuda"
            environments.append(environment)

        def run(self, function: Callable[..., Any], *arguments: Any, world: int, timeout: float) -> list[Any]:
            return super().run(calibrate_machine.time_collectives, world=world, timeout=timeout)

    host = NcclHost("2.28.9", "580.1", 4, ())
    nccl = NcclSettings(host, {"NCCL_PROTO": "Simple"}, ("NCCL_ALGO=allreduce:NVLS: it did not end within 60 s",))
    monkeypatch.setattr(calibrate_machine, "choose_device", lambda: Device("cuda", "bf16", "for a test"))
    monkeypatch.setattr(calibrate_machine, "calibrate", lambda seconds: measured(seconds, device=CPU, threads=1))
    monkeypatch.setattr(calibrate_machine, "host_facts", lambda: HostFacts(gpus=("GeForce RTX 4090",) * 4))
    monkeypatch.setattr(calibrate_machine, "nccl_settings", lambda *_, **__: nccl)
    monkeypatch.setattr(calibrate_machine, "Pool", WithEnvironment)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert main(["plan", "--calibrate"]) == 0
    assert environments == [{"NCCL_P2P_DISABLE": "1", "NCCL_PROTO": "Simple"}]
    shown = capsys.readouterr().out
    assert "NCCL 2.28.9: NCCL_PROTO=Simple" in shown and "are not searched" not in shown
    assert "left out: NCCL_ALGO=allreduce:NVLS: it did not end within 60 s" in shown
    kept = kept_calibration(processor_name(), 1)
    assert kept is not None and kept.nccl == nccl and {curve.ranks for curve in kept.curves} == {1, 2, 4}


def test_what_runs_taught_of_other_figures_is_forgotten() -> None:
    keep(Correction(processor_name(), 4, "fp32", "full"))
    keep(Correction("H100-80GB-SXM", 0, "bf16", "full"))
    assert main(["plan", "--calibrate"]) == 0
    assert kept_corrections(processor_name(), 4) == ()


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--calibrate", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [found["threads"] for found in answer["calibrations"]] == [4, 2, 1]
    assert all(Path(file).is_file() for file in answer["files"])


@pytest.mark.parametrize("seconds", ["0", "nan", "inf"])
def test_no_time_to_measure_in(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--calibrate", "--seconds", seconds]) == 2
    assert f"--seconds {seconds}: not a valid number of seconds; write 40" in capsys.readouterr().err
