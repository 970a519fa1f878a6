"""The search for settings of NCCL, with gloo and made-up settings; how runs apply what was found."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stoker.hardware.host_facts import HostFacts
from stoker.hardware.measured import nccl_settings
from stoker.hardware.measured.calibration import Calibration, Curve, MatmulTable, kept_calibration
from stoker.hardware.measured.nccl_settings import NcclHost, NcclSettings
from stoker.job import load_job
from stoker.launch import external_worker, host_settings, nccl_search
from stoker.launch.cluster_env import RankInfo
from stoker.launch.first_failure import RankFailed
from stoker.launch.nccl_search import is_faster, measure_settings, search_settings, timed_collectives
from stoker.launch.process_pool import Pool
from stoker.launch.run_spec import RunSpec

GPU = "NVIDIA H100 80GB HBM3"
FACTS = HostFacts(gpus=(GPU,) * 2, addresses=("0000:01:00.0", "0000:02:00.0"), driver="580.1", shm=2**36)
HOST = NcclHost("2.28.9", "580.1", 2, (f"0000:01:00.0 {GPU}", f"0000:02:00.0 {GPU}"))
JOB = "task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\n"


def curves(*seconds: float) -> list[Curve]:
    return [Curve(kind, (1,), (each,), 2) for kind, each in zip(("all-reduce", "all-gather"), seconds, strict=False)]


def slowed(device_type: str) -> list[Curve]:
    """A sum of this group that takes as long as the made-up setting says."""
    pace = os.environ["PACE"]
    if pace == "crash" and dist.get_rank():
        os._exit(3)
    if pace == "hang" and dist.get_rank():
        time.sleep(600)
    begin = time.perf_counter()
    if pace not in ("crash", "hang"):
        time.sleep(float(pace))
    dist.all_reduce(torch.ones(1, device=device_type))
    return [Curve("all-reduce", (4,), (time.perf_counter() - begin,), 2)]


def wrong_sum(device_type: str) -> None:
    right = dist.all_reduce
    dist.all_reduce = lambda tensor, **_: tensor.zero_()
    try:
        timed_collectives(device_type, (1024,))
    finally:
        dist.all_reduce = right


@pytest.mark.parametrize(
    ("new", "faster"),
    [((0.94, 1.04), True), ((0.96, 0.96), False), ((0.5, 1.06), False), ((1.0, 0.9), True)],
)
def test_a_setting_is_faster_somewhere_and_slower_nowhere(new: tuple[float, float], faster: bool) -> None:
    assert is_faster(curves(*new), curves(1.0, 1.0)) is faster


def test_settings_are_added_one_after_another_if_they_are_faster_twice() -> None:
    gains = {"A=1": 0.9, "A=2": 0.97, "B=1": 1.2, "C=1": 0.8}
    asked: list[dict[str, str]] = []

    def measure(settings: Mapping[str, str], limit: float) -> Sequence[Curve]:
        asked.append(dict(settings))
        seconds = 1.0
        for name, value in settings.items():
            seconds *= gains.get(f"{name}={value}", 1.0)
        if settings.get("D") == "1":  # fast by chance, once
            seconds *= 0.5 if asked.count(dict(settings)) == 1 else 1.0
        return curves(seconds)

    found, failed = search_settings([("A", "1"), ("A", "2"), ("B", "1"), ("C", "1"), ("D", "1")], measure)
    assert found == {"A": "1", "C": "1"} and failed == ()
    assert asked[0] == {} and {"A": "1", "B": "1"} in asked and {"A": "1", "C": "1", "D": "1"} in asked


@pytest.mark.pool
def test_each_candidate_has_new_processes_and_one_that_hangs_or_crashes_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl_search, "LEAST_LIMIT", 6.0)
    monkeypatch.setattr(nccl_search, "TIMES_FIRST", 0)
    measure = partial(measure_settings, count=2, device="cpu", environment={"PACE": "0.5"}, work=slowed)
    values = ["0.8", "crash", "hang", "0.1"]
    found, failed = search_settings([("PACE", value) for value in values], measure)
    assert found == {"PACE": "0.1"} and "PACE" not in os.environ
    crashed, hung = failed
    assert crashed.startswith("PACE=crash: rank 1: process ") and crashed.endswith("ended with exit code 3")
    assert hung == "PACE=hang: it did not end within 6 s"


@pytest.mark.pool
def test_collectives_are_checked_and_timed() -> None:
    with Pool(2) as pool:
        measured = pool.run(timed_collectives, "cpu", (1024, 4096))[0]
        assert [curve.kind for curve in measured][:3] == ["all-reduce", "all-gather", "reduce-scatter"]
        assert all(curve.sizes == (1024, 4096) and curve.ranks == 2 for curve in measured)
        with pytest.raises(RankFailed, match="wrong values"):
            pool.run(wrong_sum, "cpu")


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calibration:
    """Two GPUs, whose calibration found a setting."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(host_settings, "host_facts", lambda: FACTS)
    monkeypatch.setattr(nccl_settings, "nccl_version", lambda: HOST.nccl)
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    today = time.strftime("%Y-%m-%d")
    table = MatmulTable("fp32", (16,), (1.0,))
    nccl = NcclSettings(HOST, {"NCCL_PROTO": "Simple"}, ("NCCL_ALGO=Tree: failed",))
    made = Calibration(today, "here", GPU, 0, str(torch.__version__), (table,), (), 1e-6, nccl)
    made.save()
    assert kept_calibration(GPU, 0) == made
    return made


def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], world: int = 2) -> str | None:
    """The variable that the code of a worker sees."""
    (tmp_path / "job.yaml").write_text(JOB)
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")
    seen: dict[str, str] = {}
    monkeypatch.setattr(external_worker, "start_exit_guard", lambda *_: None)
    monkeypatch.setattr(external_worker, "train", lambda *_, **__: seen.update(os.environ))
    monkeypatch.setattr(os, "environ", {"STOKER_CACHE": os.environ["STOKER_CACHE"], **environment})
    external_worker.train_as_member(spec, RankInfo(0, world, 0, world), nullcontext(lambda *_: None))
    return seen.get("NCCL_PROTO")


def test_a_worker_has_the_setting_unless_the_user_set_it(
    calibrated: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(tmp_path, monkeypatch, {}) == "Simple"
    said = f"host       NCCL_PROTO=Simple (the fastest settings of NCCL, calibrated on {calibrated.date})"
    assert said in capsys.readouterr().out
    assert started(tmp_path, monkeypatch, {"NCCL_PROTO": "LL"}) == "LL"
    assert "NCCL_PROTO" not in capsys.readouterr().out
    assert started(tmp_path, monkeypatch, {}, world=1) is None


@pytest.mark.parametrize(
    ("change", "world", "said"),
    [
        ({"nccl": "2.27.3"}, 2, "NCCL 2.27.3 was measured, and 2.28.9 is installed"),
        ({"driver": "570.2"}, 2, "driver 570.2 was measured, and 580.1 is installed"),
        ({"gpus": ("0000:03:00.0 NVIDIA A100",)}, 2, "other GPUs were measured"),
        ({}, 4, "2 GPUs were measured, and the run has 4 processes"),
    ],
)
def test_settings_of_another_host_are_not_applied(
    calibrated: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    change: dict[str, object], world: int, said: str,
) -> None:  # fmt: skip
    assert calibrated.nccl is not None
    host = replace(HOST, **change)  # type: ignore[arg-type]
    replace(calibrated, nccl=replace(calibrated.nccl, host=host)).save()
    assert started(tmp_path, monkeypatch, {}, world) is None
    assert f"the calibration's NCCL settings are not used: {said}" in capsys.readouterr().out


@pytest.mark.parametrize(("gpu", "forced"), [(GPU, True), ("NVIDIA GeForce RTX 4090", False), ("no such GPU", False)])
def test_a_protocol_that_may_corrupt_data_is_tried_over_nvlink_only(
    monkeypatch: pytest.MonkeyPatch, gpu: str, forced: bool
) -> None:
    tried: list[tuple[str, str]] = []

    def search(
        candidates: Sequence[tuple[str, str]], *_: object, **__: object
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        tried.extend(candidates)
        return {}, ()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    monkeypatch.setattr(nccl_search, "search_settings", search)
    monkeypatch.setattr(nccl_settings, "nccl_version", lambda: HOST.nccl)
    monkeypatch.setenv("NCCL_BUFFSIZE", "1048576")
    nccl_search.nccl_settings(FACTS, {}, report=lambda _: None)
    assert (nccl_search.OVER_NVLINK in tried) is forced and ("NCCL_PROTO", "Simple") in tried
    assert not [name for name, _ in tried if name == "NCCL_BUFFSIZE"]  # the user has set it
