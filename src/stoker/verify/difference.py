"""Comparison of two runs: the largest differences, and the first one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Key = tuple[int, str]  # step, and name of the number or parameter

# The values of a step, in the order of their computation, with the description of a difference.
STEP_VALUES = {
    "samples": "the samples up to step {}",
    "targets": "the targets of step {}",
    "loss": "the loss of step {}",
    "gradient": "the gradient of {{}} in step {}",
    "gradient norm": "the gradient norm of step {}",
    "learning rate": "the learning rate of step {}",
    "evaluation loss": "the evaluation loss after step {}",
    "evaluation accuracy": "the evaluation accuracy after step {}",
}


@dataclass(frozen=True)
class Difference:
    """Difference of two values of one quantity, relative to the reference where that is above 1.

    Attributes:
        size: NaN where one side is not a number, infinite where one side has no such value.
        where: description: ``the loss of step 2``.
    """

    size: float
    where: str

    def within(self, bound: float) -> bool:
        return self.size <= bound  # NaN is not

    def beyond(self, bound: float) -> str:
        """Formats the difference for a message."""
        if math.isinf(self.size):
            return self.where
        return f"{self.where} differs by {self.size:.2e}, and at most {bound:.0e} is allowed"


@dataclass(frozen=True)
class TraceComparison:
    """Differences of a run from a reference.

    Attributes:
        largest: the largest by kind of value: those of `STEP_VALUES`, and ``weight``.
        in_order: all differences, in the order of computation.
    """

    largest: Mapping[str, Difference]
    in_order: tuple[Difference, ...]

    def size(self, kind: str) -> float:
        """Returns the largest difference of a kind."""
        return self.largest[kind].size if kind in self.largest else 0.0

    def first_beyond(self, bound: float) -> str | None:
        """Describes the first quantity that differs by more than ``bound``; None if none does."""
        return next((found.beyond(bound) for found in self.in_order if not found.within(bound)), None)

    def as_json(self) -> dict[str, Any]:
        """Returns the largest differences for JSON output."""
        return {
            "max_loss_diff": self.size("loss"),
            "max_grad_norm_diff": self.size("gradient norm"),
            "max_grad_diff": self.size("gradient"),
            "max_weight_diff": self.size("weight"),
            "max_evaluation_diff": self.size("evaluation loss"),
        }


@dataclass(frozen=True)
class Computed:
    """Values that a run computed.

    Attributes:
        numbers: numbers of each step, by step and name; those of evaluations by the last finished step.
        gradients: whole gradients by step and parameter, of the first and the last step, as passed to the optimizer.
        weights: whole weights by parameter, after the last step.
    """

    numbers: Mapping[Key, float]
    gradients: Mapping[Key, Tensor]
    weights: Mapping[str, Tensor]

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss of each step."""
        return self._each("loss")

    @property
    def grad_norms(self) -> tuple[float, ...]:
        """Gradient norm of each step, before clipping."""
        return self._each("gradient norm")

    def _each(self, name: str) -> tuple[float, ...]:
        return tuple(value for (_, key), value in sorted(self.numbers.items()) if key == name)


def compare(run: Computed, reference: Computed, *, after: int = 0, without: Collection[str] = ()) -> TraceComparison:
    """Compares a run with a reference.

    Args:
        after: the step that the run resumes from; earlier steps are not compared.
        without: parts of names of parameters that are left out.
    """
    largest: dict[str, Difference] = {}
    in_order: list[Difference] = []
    for kind, found in _differences(run, reference, after, without):
        in_order.append(found)
        if kind not in largest or not _rank(found) <= _rank(largest[kind]):
            largest[kind] = found
    return TraceComparison(largest, tuple(in_order))


def _differences(
    run: Computed, reference: Computed, after: int, without: Collection[str]
) -> Iterator[tuple[str, Difference]]:
    keys = {key for key in (*run.numbers, *reference.numbers) if key[0] > after or key[0] == after == 0}
    for step in sorted({step for step, _ in keys}):
        for name, where in STEP_VALUES.items():
            place = where.format(step)
            if name == "gradient":
                for found in _tensors(_gradients(run, step), _gradients(reference, step), place, without):
                    yield name, found
            elif (step, name) in keys:
                yield name, _number(run.numbers.get((step, name)), reference.numbers.get((step, name)), place)
    for found in _tensors(run.weights, reference.weights, "the weight {} after the last step", without):
        yield "weight", found


def _gradients(run: Computed, step: int) -> dict[str, Tensor]:
    return {parameter: gradient for (at, parameter), gradient in run.gradients.items() if at == step}


def _number(value: float | None, expected: float | None, where: str) -> Difference:
    if value is None or expected is None:
        return Difference(math.inf, f"{where}: one of them has none")
    return Difference(abs(value - expected) / max(1.0, abs(expected)), where)


def _tensors(
    values: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str, without: Collection[str]
) -> list[Difference]:
    """Returns the differences of tensors, the largest first."""
    found = []
    for name in values.keys() | expected.keys():
        place = where.format(name)
        if any(part in name for part in without):
            continue
        if name not in values or name not in expected:
            found.append(Difference(math.inf, f"{place}: only {'this run' if name in values else 'the other'} has it"))
        elif values[name].shape != expected[name].shape:
            shapes = f"{tuple(values[name].shape)}, not {tuple(expected[name].shape)}"
            found.append(Difference(math.inf, f"{place} has the shape {shapes}"))
        elif expected[name].numel():
            found.append(Difference(distance(values[name], expected[name]), place))
    return sorted(found, key=lambda each: (_rank(each), each.where), reverse=True)


def distance(value: Tensor, expected: Tensor) -> float:
    """Returns the largest difference of two tensors, relative to the largest value where that is above 1."""
    return float((value - expected).abs().max()) / max(1.0, float(expected.abs().max()))


def _rank(difference: Difference) -> float:
    """Sort key of differences: NaN is larger than every number."""
    return math.inf if math.isnan(difference.size) else difference.size
