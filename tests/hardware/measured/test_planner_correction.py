"""What a finished run showed: kept for its device, and applied to later predictions for it."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from feasible_settings import feasible_settings
from stoker.errors import UserError
from stoker.hardware.cache_folder import device_file
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.hardware.measured.planner_correction import Correction, fitted, forget, keep, kept_corrections
from stoker.plan.memory.memory_formulas import stage_memory
from stoker.plan.search import search
from stoker.plan.setting import TrainingWork
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.time.pass_times import PassTimes
from stoker.plan.time.step_time import step_time

H100 = Correction("H100-80GB-SXM", 0, "bf16", "full", stoker=version("stoker"))
MEMORY = {"weights": 4e9, "gradients": 4e9, "optimizer": 8e9, "activations": 3e9, "buffers": 1e9}
TIME = {"compute": 2.0, "optimizer": 0.25, "data parallel": 0.5}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("memory", "seconds", "factor", "constant"),
    [
        (
            22e9,
            4.125,
            1.5,
            0.0,
        ),  # 6 GB of activations and buffers instead of 4; computation takes 3.625 instead of 2.25
        (20e9, 2.75, 1.0, 0.0),
        (28e9, 2.75, 2.0, 4e9),  # more than activations are ever off by
        (17e9, 2.75, 0.5, -1e9),
    ],
)
def test_a_correction_makes_the_prediction_what_was_measured(
    memory: float, seconds: float, factor: float, constant: float
) -> None:
    found = fitted(H100, memory_parts=MEMORY, time_parts=TIME, memory=memory, seconds=seconds)
    assert (found.memory, found.constant) == pytest.approx((factor, constant))
    assert found.compute == pytest.approx((seconds - 0.5) / 2.25)
    assert sum(found.memory_parts(MEMORY).values()) == pytest.approx(memory)
    assert sum(found.time_parts(TIME).values()) == pytest.approx(seconds)
    assert found.memory_parts(MEMORY)["weights"] == 4e9
    assert found.time_parts(TIME)["data parallel"] == 0.5


def test_one_is_kept_for_each_kind_of_run() -> None:
    keep(replace(H100, compute=1.2))
    keep(replace(H100, compute=1.4, tuning="lora"))
    keep(replace(H100, compute=1.3))
    assert {(c.tuning, c.compute) for c in kept_corrections(H100.device, 0)} == {("full", 1.3), ("lora", 1.4)}
    assert kept_corrections("A100-80GB-SXM", 0) == ()
    forget(H100.device, 0)
    assert kept_corrections(H100.device, 0) == ()


def test_those_of_another_version_are_not_used() -> None:
    keep(replace(H100, stoker="0.0.1"))
    assert kept_corrections(H100.device, 0) == ()


def test_a_damaged_file_is_told_and_not_used() -> None:
    path = device_file("correction", H100.device, 0)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        kept_corrections(H100.device, 0)
    cluster = load_cluster("8xH100")
    assert cluster.corrections == () and "damaged" in cluster.notes[-1]


def test_plans_for_the_device_are_corrected_and_say_so() -> None:
    plain = load_cluster("8xH100")
    keep(replace(H100, compute=1.5, memory=1.25, constant=2e9, run="runs/sea"))
    cluster = load_cluster("8xH100")
    assert "full tuning in bf16 is corrected by the run runs/sea" in cluster.notes[-1]
    assert load_cluster("8xA100").corrections == ()
    work = TrainingWork(shape_named("llama3-8b"), 4096, 16)
    for setting in list(feasible_settings(work, plain))[::23]:
        corrected = replace(setting, cluster=cluster)
        before, after = step_time(setting), step_time(corrected)
        assert after.parts["compute"] == pytest.approx(1.5 * before.parts["compute"])
        assert after.parts.get("data parallel") == before.parts.get("data parallel")
        assert PassTimes().least(corrected) <= after.total + 1e-9  # what the search leaves out cannot win
        old, new = stage_memory(setting, 0), stage_memory(corrected, 0)
        states = sum(old.parts.get(name, 0.0) for name in ("weights", "gradients", "optimizer", "workspaces"))
        assert new.peak == pytest.approx(states + 1.25 * (old.peak - states) + 2e9)
    lora = replace(work, tuning="lora")
    assert search(lora, cluster).plans[0].seconds == search(lora, plain).plans[0].seconds


def test_a_correction_of_other_measurements_is_not_used() -> None:
    keep(replace(H100, compute=1.5, calibration="2026-01-01"))  # this cluster's figures are the catalogue's
    assert load_cluster("8xH100").corrections == ()


def test_components_whose_size_is_known_are_not_corrected() -> None:
    halved = replace(H100, memory=0.5)
    assert halved.memory_parts({"frozen copies": 14e9, "activations": 4e9}) == {
        "frozen copies": 14e9,
        "activations": 2e9,
    }
