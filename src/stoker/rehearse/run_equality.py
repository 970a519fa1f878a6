"""Comparison of a run with faults and one without: losses of every step, final weights, samples seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.rows_by_id import rows_by_id
from stoker.checkpoint.tensor_names import TABLES
from stoker.runs.run_folder import RunFolder

# Largest relative difference of losses and weights under another layout, by precision of the passes.
TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "fp16": 3e-2, "bf16": 3e-2}


@dataclass(frozen=True)
class Equality:
    """Comparison of the ends of two runs.

    Attributes:
        steps: steps of the run without faults; ``reached`` those of the other.
        first_difference: the first step with different losses; None if all are bitwise equal.
        loss, weight: the largest relative difference; infinite where a value is missing.
        samples: whether both saw every sample at the same step, and so exactly once.
        tolerance: bound of ``loss`` and ``weight``; 0 under the same layout.
    """

    steps: int
    reached: int
    first_difference: int | None
    loss: float
    weight: float
    samples: bool
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the runs ended equally."""
        return self.reached == self.steps and self.samples and max(self.loss, self.weight) <= self.tolerance


def compare(calm: RunFolder, other: RunFolder, *, precision: str, same_layout: bool) -> Equality:
    """Compares two finished runs, one of which met faults.

    Args:
        precision: precision of the passes, which determines the tolerance under another layout.
    """
    expected, found = calm.read_metrics(), other.read_metrics()
    steps, reached = (lines[-1]["step"] if lines else 0 for lines in (expected, found))
    differences = [_relative(a["loss"], b["loss"]) for a, b in zip(expected, found, strict=False)]
    return Equality(
        steps=steps,
        reached=reached,
        first_difference=next((n for n, difference in enumerate(differences, 1) if difference), None),
        loss=max(differences, default=math.inf) if len(expected) == len(found) else math.inf,
        weight=_weights_apart(Store(calm.checkpoints), Store(other.checkpoints), steps),
        samples=_seen(expected) == _seen(found),
        tolerance=0.0 if same_layout else TOLERANCES[precision],
    )


def _seen(lines: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Returns each step with the samples consumed by its end."""
    return [(line["step"], line["samples"]) for line in lines]


def _relative(a: float | None, b: float | None) -> float:
    if a == b:
        return 0.0
    return math.inf if a is None or b is None else abs(a - b) / max(abs(a), abs(b))


def _weights_apart(calm: Store, other: Store, step: int) -> float:
    """Returns the largest difference of a tensor in the last checkpoint, relative to the tensor's largest value."""
    if step not in calm.steps() or step not in other.steps():
        return math.inf
    expected, found = _tensors(calm, step), _tensors(other, step)
    if expected.keys() != found.keys():
        return math.inf
    return max((_apart(expected[name], found[name]) for name in expected), default=0.0)


def _tensors(store: Store, step: int) -> dict[str, Tensor]:
    """Loads a checkpoint, with the rows of tables sorted by id."""
    tensors = {name: tensor for name, tensor in store.load(step).tensors.items() if isinstance(tensor, Tensor)}
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(TABLES)}
    return others | {TABLES + name: tensor for name, tensor in rows_by_id(tensors).items()}


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    size = max(float(a.double().abs().max()), 1e-30)
    difference = float((a.double() - b.double()).abs().max()) / size
    return difference if math.isfinite(difference) else math.inf
