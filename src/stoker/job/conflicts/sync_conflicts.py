"""Checks of `parallel.sync`: islands that train independently between two synchronisations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from stoker.errors import Problem
from stoker.job.conflicts.conflict_view import View
from stoker.job.conflicts.layout_conflicts import copies_of
from stoker.job.resolution.batch_solver import divisors
from stoker.job.resolution.island_count import islands_of

KEYS = ["parallel.sync.islands", "parallel.sync.every"]


def _without_effect(view: View) -> Iterator[Problem]:
    every, outer = view.value("parallel.sync.every"), view.value("parallel.sync.outer")
    for name in ("outer", "outer_lr", "outer_momentum", "islands"):
        key = f"parallel.sync.{name}"
        if not view.differs(key) or (name == "islands" and view.value(key) == 1):
            continue
        if every == 1:
            message = f"`sync.{name}` has no effect with `sync.every: 1`, where gradients are summed in every step"
            yield from view.at_each([key], message, "also write `every: 100`, or remove it")
        elif outer == "average" and name in ("outer_lr", "outer_momentum"):
            message = f"`sync.{name}` is of `outer: nesterov`, and it is average"
            yield from view.at_each([key], message, "remove it, or write `outer: nesterov`")


def _other_weights(view: View) -> Iterator[Problem]:
    """Yields keys that need identical weights everywhere at a step between two synchronisations."""
    every, task = view.value("parallel.sync.every"), view.task
    if every == 1:
        return
    if task.rows.prompts or task.ranks:
        message = f"`task: {task.name}` needs the same weights on all processes in every step"
        yield from view.at_each(KEYS, message, "remove `sync`")
    if view.value("train.average") is not None:
        message = "`train.average` follows the weights of one island, which are not those of the run"
        yield from view.at_each(["train.average", *KEYS], message, "remove it, or `sync`")
    evaluated = view.value("evaluate.every")
    if evaluated != "auto" and evaluated % every:
        message = (
            f"`evaluate.every: {evaluated}` falls between two synchronisations; each island has its own weights there"
        )
        yield from view.at_each(["evaluate.every", KEYS[1]], message, f"write a multiple of {every}")


def _decided(view: View, copies: int) -> int | None:
    """Returns the number of islands; None if it depends on an unknown number of nodes."""
    islands, nodes = view.value("parallel.sync.islands"), view.document.nodes
    if islands != "auto":
        return cast(int, islands)
    return None if nodes is None else islands_of(copies, nodes)


def _number(view: View) -> Iterator[Problem]:
    every, islands = view.value("parallel.sync.every"), view.value("parallel.sync.islands")
    if every == 1:
        return
    copies = copies_of(view)
    if copies == 1:
        message = f"`sync.every: {every}` needs several copies of the model, and there is one"
        hint = "raise `data`, or lower `shard_size`, which is what a copy is spread over"
        yield from view.at_each(KEYS, message, hint)
    elif islands != "auto" and (islands == 1 or copies % islands):
        sizes = " or ".join(str(n) for n in divisors(copies) if n > 1)
        message = f"{copies} copies of the model cannot form {islands} island{'s' * (islands > 1)}"
        yield from view.at_each(KEYS, message, f"write `islands: {sizes}`")
    elif (
        view.value("parallel.compress") != "none"
        and view.value("parallel.shard") == "none"
        and copies == _decided(view, copies)
    ):
        message = "`compress` applies to gradients that copies sum, and each island has one copy"
        yield from view.at_each(["parallel.compress", *KEYS], message, "remove it, or write fewer `islands`")


SYNC_CHECKS: tuple[Callable[[View], Iterator[Problem]], ...] = (_without_effect, _other_weights, _number)
