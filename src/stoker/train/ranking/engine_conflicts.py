"""Settings that ``engine: torchrec`` does not support, each with the nearest valid one; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.errors import Problem
    from stoker.job.conflicts.conflict_view import View

ENGINE = "ranking.engine"
OPTIMIZERS = ("rowwise-adagrad", "adagrad", "sgd")  # FBGEMM's optimizers that match the own engine step by step
OWN = "or write `engine: stoker`"


def engine_conflicts(view: View) -> Iterator[Problem]:
    """Yields the job's settings that its engine does not support."""
    if view.value(ENGINE) == "stoker":
        if view.value("ranking.table.rows") is not None:
            message = "`table.rows` is the fixed size of TorchRec's tables, and those of `engine: stoker` grow"
            yield from view.at_each(["ranking.table.rows", ENGINE], message, "remove it, or write `engine: torchrec`")
        return
    yield from _tables(view)
    yield from _around(view)


def _tables(view: View) -> Iterator[Problem]:
    has_no = {
        "admission": ("gives every id a row at once, which ids share", "remove `admission`"),
        "eviction": ("never deletes a row", "remove `eviction`, state `table.rows` instead"),
        "memory_rows": ("keeps all rows in the device's memory", "remove `memory_rows`, state `table.rows` instead"),
    }
    for name, (what, hint) in has_no.items():
        key = f"ranking.table.{name}"
        if view.value(key) is not None:
            yield from view.at_each([key, ENGINE], f"`engine: torchrec` {what}", f"{hint}, {OWN}")
    optimizer = view.value("ranking.table.optimizer")
    if optimizer not in OPTIMIZERS:
        message = f"`engine: torchrec` has no {optimizer} that steps each row by its own number of updates"
        if optimizer == "ftrl":
            message = "`engine: torchrec` has no ftrl"
        hint = f"write {', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}, {OWN}"
        yield from view.at_each(["ranking.table.optimizer", ENGINE], message, hint)
    if view.value("ranking.table.initial"):
        message = "`engine: torchrec` starts its sums of squares at 0"
        yield from view.at_each(["ranking.table.initial", ENGINE], message, f"remove `initial`, {OWN}")
    if view.value("ranking.table.dtype") != "float32":
        message = f"`engine: torchrec` has rows of float32, and `dtype` is {view.value('ranking.table.dtype')}"
        yield from view.at_each(["ranking.table.dtype", ENGINE], message, f"write `dtype: float32`, {OWN}")


def _around(view: View) -> Iterator[Problem]:
    if view.value("ranking.servers") is not None:
        message = "`engine: torchrec` keeps its rows in the training processes, and cannot use `servers`"
        yield from view.at_each(["ranking.servers", ENGINE], message, f"remove `servers`, {OWN}")
    if view.value("ranking.model") == "din":
        message = "`model: din` weighs every id of a sequence, and `engine: torchrec` gives their sums"
        yield from view.at_each(["ranking.model", ENGINE], message, f"write `model: dcn`, {OWN}")
    if view.value("train.precision") == "fp64":
        message = "`engine: torchrec` has rows of float32, and `precision` is fp64"
        yield from view.at_each(["train.precision", ENGINE], message, f"write `precision: fp32`, {OWN}")
    if view.value("checkpoint.full_every") != 1:
        message = "`engine: torchrec` does not know which rows have changed since a checkpoint"
        yield from view.at_each(["checkpoint.full_every", ENGINE], message, f"write `full_every: 1`, {OWN}")
    if view.value("export.sync") is not None:
        message = "`export.sync` sends rows by their ids, and `engine: torchrec` numbers them by hashes"
        yield from view.at_each(["export.sync", ENGINE], message, f"remove `sync`, {OWN}")
