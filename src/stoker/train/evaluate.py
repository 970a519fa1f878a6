"""Held-out loss, perplexity and accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from stoker.train.engine import Engine, Totals
from stoker.train.part_passes import evaluation_mode
from stoker.train.task import Part, Task

TOGETHER = 64  # held-out parts for each data-parallel process that are evaluated together


@dataclass(frozen=True)
class Evaluation:
    """Means over all held-out targets.

    Attributes:
        loss: the task's loss per target; for cross entropy in nats.
        accuracy: share of targets that were the most likely choice; None if the task has no accuracy.
        targets: number of targets.
        target: name of one target.
        perplexity: exp(loss); None if the task's loss has none.
        measures: further measures of the task's objective, as means over the targets.
    """

    loss: float
    accuracy: float | None
    targets: int
    target: str = "token"
    perplexity: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)


@torch.no_grad()
def evaluate(task: Task, engine: Engine, parts: Iterable[Part] | None = None) -> Evaluation | None:
    """Evaluates on the held-out parts or the given ones; None without any. The modules' modes are restored."""
    held_out = iter(task.evaluation() if parts is None else parts)
    found: list[Totals] = []
    with evaluation_mode(task.model):
        while some := list(islice(held_out, TOGETHER * engine.replicas)):
            found.append(engine.evaluate(some))
            del some  # before the next ones are built
    if not found:
        return None
    sums, totals = _sums(task, engine), _sum_of(found)
    if not totals.targets:
        return None
    accuracy = totals.correct / totals.targets if totals.correct is not None else None
    loss = totals.loss / totals.targets
    perplexity = math.exp(min(loss, 700.0)) if task.perplexity else None  # e^709 is the largest double
    means = task.measures.means(sums, totals.targets) if task.measures is not None else {}
    return Evaluation(loss, accuracy, totals.targets, task.target, perplexity, means)


def _sum_of(found: Sequence[Totals]) -> Totals:
    known = [one.correct for one in found if one.correct is not None]
    correct = sum(known) if len(known) == len(found) else None
    return Totals(sum(one.loss for one in found), correct, sum(one.targets for one in found))


def _sums(task: Task, engine: Engine) -> list[float]:
    if task.measures is None:
        return []
    sums = task.measures.take(torch.zeros((), dtype=torch.float64))
    return engine.add_up(sums, sums[:0]).tolist()
