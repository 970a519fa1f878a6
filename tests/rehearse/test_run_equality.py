"""Two runs that are over are compared step by step and tensor by tensor."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.state import State
from stoker.rehearse.run_equality import Equality, compare
from stoker.runs.run_folder import RunFolder
from stoker.runs.step_metrics import MetricsWriter, StepMetrics


def run_at(
    path: Path, *, losses: tuple[float, ...] = (3.0, 2.0, 1.0), weight: float = 1.0, samples: int = 4
) -> RunFolder:
    path.mkdir()
    folder = RunFolder(path)
    writer = MetricsWriter(folder)
    for step, loss in enumerate(losses, 1):
        writer.write(StepMetrics(step, loss, 1.0, 1e-3, 64, 32, 100.0, 0.5, 0.64, samples=samples * step))
    writer.close()
    tensors = {"model/w": torch.tensor([weight, 4.0]), "optimizer/w/step": torch.tensor(3.0)}
    Store(folder.checkpoints).save(State(len(losses), tensors, {}))
    return folder


def compared(base: Path, *, same_layout: bool = True, **other: object) -> Equality:
    calm = run_at(base / "calm")
    return compare(calm, run_at(base / "other", **other), precision="fp32", same_layout=same_layout)  # type: ignore[arg-type]


def test_equal_to_the_bit(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found.holds and (found.loss, found.weight, found.first_difference) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    ("other", "loss", "weight", "first"),
    [
        ({"losses": (3.0, 2.000001, 1.0)}, 5e-7, 0.0, 2),
        ({"losses": (3.0, math.nan, 1.0)}, math.inf, 0.0, 2),
        ({"weight": 1.000001}, 0.0, 2.4e-7, None),
        ({"weight": math.nan}, 0.0, math.inf, None),
        ({"losses": (3.0, 2.0)}, math.inf, math.inf, None),
    ],
)
def test_what_differs(tmp_path: Path, other: dict[str, object], loss: float, weight: float, first: int | None) -> None:
    found = compared(tmp_path, **other)
    assert not found.holds and found.first_difference == first
    assert found.loss == pytest.approx(loss, rel=0.1) and found.weight == pytest.approx(weight, rel=0.1)


def test_under_another_layout_rounding_is_allowed(tmp_path: Path) -> None:
    assert compared(tmp_path, same_layout=False, weight=1.000001, losses=(3.0, 2.000001, 1.0)).holds
    (tmp_path / "more").mkdir()
    assert not compared(tmp_path / "more", same_layout=False, weight=1.01).holds


def test_samples_seen_otherwise(tmp_path: Path) -> None:
    found = compared(tmp_path, samples=5)
    assert not found.samples and not found.holds


def test_a_run_that_does_not_reach_the_end_or_has_other_types_differs(tmp_path: Path) -> None:
    equal = Equality(3, 3, None, 0.0, 0.0, samples=True, tolerance=0.0)
    assert equal.holds and not replace(equal, reached=2).holds
    assert not replace(equal, weight=1e-9).holds and not replace(equal, loss=1e-9).holds
    calm, other = run_at(tmp_path / "calm"), run_at(tmp_path / "other")
    shutil.rmtree(other.checkpoints)
    weight = torch.tensor([1.0, 4.0]).to(torch.bfloat16)
    Store(other.checkpoints).save(State(3, {"model/w": weight, "optimizer/w/step": torch.tensor(3.0)}, {}))
    assert compare(calm, other, precision="fp32", same_layout=False).weight == math.inf
