"""Checks of the block `model`: where its initial weights come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stoker.errors import Problem
from stoker.job.conflicts.conflict_view import View
from stoker.job.scratch_sizes import SCRATCH


def _random_weights(view: View) -> Iterator[Problem]:
    model = view.value("model")
    if not view.task.text or model is None or model.weights != "random" or view.document.continues:
        return
    if model.quantise != "none":
        message = f"`model.quantise: {model.quantise}` freezes the base, and its random weights must be trained"
        yield from view.at_each(["model.weights", "model.quantise"], message, "remove `quantise`")
    if (method := view.value("tune.method")) != "full":
        message = f"`tune: {method}` freezes the model, and its random weights must be trained"
        yield from view.at_each(["model.weights", "tune.method"], message, "write `tune: full`")


def _catalogue_sizes(view: View) -> Iterator[Problem]:
    model = view.value("model")
    if model is None or model.name not in SCRATCH:
        return
    for key, given in (("weights", model.weights != "stored"), ("config", bool(model.config))):
        if given:
            message = f"`model.{key}` has no effect: {model.name} of the catalogue has random weights and its own size"
            hint = "name a hub id, or a folder with a config.json and a tokenizer"
            yield from view.at_each([f"model.{key}"], message, hint)


MODEL_CHECKS: tuple[Callable[[View], Iterator[Problem]], ...] = (_random_weights, _catalogue_sizes)
