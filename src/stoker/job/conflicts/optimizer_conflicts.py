"""Checks of the optimizer: its settings, its states, and the layouts and tuning methods that it cannot train with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stoker.errors import Problem
from stoker.job.conflicts.conflict_view import View

SETTINGS = frozenset({"beta1", "beta2", "eps"})  # keys of `train` that not every optimizer uses
SETTINGS_OF = {"adamw": SETTINGS, "muon": SETTINGS, "sgd": frozenset({"beta1"}), "adafactor": frozenset()}
"""The keys of `SETTINGS` that each optimizer uses."""


def _settings(view: View) -> Iterator[Problem]:
    optimizer, shape = view.value("train.optimizer"), view.value("train.schedule")
    for name in sorted(SETTINGS - SETTINGS_OF[optimizer]):
        if view.given(f"train.{name}") and not view.is_recorded(f"train.{name}"):
            message = f"`train.{name}` has no effect with `optimizer: {optimizer}`"
            yield from view.at_each([f"train.{name}"], message, "remove it, or write `optimizer: adamw`")
    if shape == "constant" and view.differs("train.min_lr") and not view.is_recorded("train.min_lr"):
        message = "`train.min_lr` has no effect with `schedule: constant`, whose rate stays at `lr`"
        yield from view.at_each(["train.min_lr"], message, "remove it, or write `schedule: cosine`")


def _adafactor(view: View) -> Iterator[Problem]:
    tensor, shard = view.value("parallel.tensor"), view.value("parallel.shard")
    cut = "tensor" if tensor > 1 else "shard" if shard != "none" else None
    if cut is not None and view.value("train.optimizer") == "adafactor":
        message = f"`optimizer: adafactor` takes means over whole rows and columns, and `{cut}` gives a process a part"
        hint = f"write `optimizer: adamw`, or remove `{cut}`"
        yield from view.at_each(["train.optimizer", f"parallel.{cut}"], message, hint)


def _states(view: View) -> Iterator[Problem]:
    optimizer, states = view.value("train.optimizer"), view.value("train.optimizer_states")
    if states == "fp32":
        return
    if optimizer != "adamw":
        message = f"`optimizer_states` is about AdamW's moments, and `optimizer` is {optimizer}"
        yield from view.at_each(["train.optimizer_states", "train.optimizer"], message, "write `optimizer: adamw`")
    elif view.task.text and states == "8bit" and view.value("tune.method") != "full":
        message = "`optimizer_states: 8bit` rounds rows in blocks of 64, and those of adapters are shorter"
        hint = "write `optimizer_states: bf16`: adapters have few moments"
        yield from view.at_each(["train.optimizer_states", "tune.method"], message, hint)
    if view.value("train.precision") == "fp64" and not view.is_recorded("train.optimizer_states"):
        message = f"`optimizer_states: {states}` rounds AdamW's moments, and `precision: fp64` rounds nothing"
        keys = ["train.optimizer_states", "train.precision"]
        yield from view.at_each(keys, message, "remove `optimizer_states`, or write `precision: fp32`")


def _muon(view: View) -> Iterator[Problem]:
    if view.value("train.optimizer") != "muon":
        return
    muon, offload = "`optimizer: muon` orthogonalises whole matrices of weights", view.value("parallel.offload")
    if view.value("parallel.tensor") > 1:
        message = f"{muon}, and `tensor` gives a process a part of each"
        hint = "write `optimizer: adamw`, or `shard` instead of `tensor`"
        yield from view.at_each(["train.optimizer", "parallel.tensor"], message, hint)
    if offload in ("optimizer", "params"):
        message = f"{muon}, and `offload: {offload}` steps on the host, which multiplies slowly"
        hint = "write `optimizer: adamw`, or `offload: none`"
        yield from view.at_each(["train.optimizer", "parallel.offload"], message, hint)
    if view.task.text and view.value("tune.method") != "full":
        message = f"{muon}, and `tune: {view.value('tune.method')}` trains none"
        yield from view.at_each(["train.optimizer", "tune.method"], message, "write `optimizer: adamw`")


OPTIMIZER_CHECKS: tuple[Callable[[View], Iterator[Problem]], ...] = (_settings, _adafactor, _states, _muon)
