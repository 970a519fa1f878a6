"""Checks of the block `tune`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from stoker.errors import Problem
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.conflicts.conflict_view import View
from stoker.job.keys.tune_keys import VIRTUAL, has_prefix, keys_of, methods_with


def _quantised_base(view: View) -> Iterator[Problem]:
    method, quantise = view.value("tune.method"), view.value("model.quantise")
    keys = ["model.quantise", "tune.method"]
    if method == "full" and quantise not in (None, "none"):
        message = f"`model.quantise: {quantise}` freezes the base, and `tune: full` trains it"
        yield from view.at_each(keys, message, "write `tune: lora`, or remove `quantise`")
    if method == "qlora" and view.given("model.quantise") and quantise != "4bit":
        message = f"`tune: qlora` holds the base in 4 bits, not `{quantise}`"
        yield from view.at_each(
            keys, message, f"write `tune: lora` beside `quantise: {quantise}`, or remove `quantise`"
        )


def _rounded_activations(view: View) -> Iterator[Problem]:
    if view.value("model.quantise") != "8bit" or view.is_recorded("model.quantise"):
        return
    if view.task.rows.prompts or any("reference" in role for role in view.task.work.roles(view.job)):
        message = (
            f"`quantise: 8bit` rounds activations outside of training passes, and `task: {view.value('task')}` "
            "compares log-probabilities of both"
        )
        yield from view.at_each(["model.quantise"], message, "write `quantise: 4bit`, or `int8`")


def _keys_of_other_methods(view: View) -> Iterator[Problem]:
    if not view.task.text:
        return
    method = view.value("tune.method")
    for name in TuneBlock.model_fields:
        if name != "method" and name not in keys_of(method) and view.given(f"tune.{name}"):
            message = f"`tune.{name}` has no effect in `tune: {method}`"
            hint = f"also write `method: {methods_with(name)[0]}`, or remove it"
            yield from view.at_each([f"tune.{name}"], message, hint)
    if method == "p-tuning" and view.value("tune.deep"):
        for name in ("encoder", "width"):
            if view.given(f"tune.{name}"):
                message = f"`tune.{name}` has no effect: `deep` virtual tokens have no encoder"
                yield from view.at_each([f"tune.{name}", "tune.deep"], message, "remove one of them")
    idle = method == "prefix" and not view.value("tune.projection")
    if idle and view.given("tune.width") and not view.is_recorded("tune.width"):
        message = "`tune.width` has no effect: without `projection` a prefix has no network"
        yield from view.at_each(["tune.width", "tune.projection"], message, "remove one of them")


def _layers(view: View) -> Iterator[Problem]:
    layers = view.value("tune.layers")
    if layers != "all" and not re.fullmatch(r"\d+(-\d*)?(,\d+(-\d*)?)*", layers):
        message = f"`tune.layers` must be all, or numbers and ranges of blocks, not {layers!r}"
        yield from view.at_each(["tune.layers"], message, 'write "0-3,20-": the first four, and all from the 21st on')


def _virtual_tokens_whole(view: View) -> Iterator[Problem]:
    method = view.value("tune.method")
    if not view.task.text or method not in VIRTUAL:
        return
    for axis in ("tensor", "pipeline", "context"):
        if view.value(f"parallel.{axis}") > 1:
            message = (
                f"`{axis}` gives a process a part of the model or of a row, `tune: {method}` is made for whole ones"
            )
            hint = "write `data` instead, with `shard: zero3` to spread the weights, or `tune: lora`"
            yield from view.at_each([f"parallel.{axis}", "tune.method"], message, hint)
    if has_prefix(method, deep=view.value("tune.deep")) and view.value("parallel.recompute") != "none":
        message = "`recompute` runs a block a second time, which would add the keys and values of the prefix twice"
        yield from view.at_each(["parallel.recompute", "tune.method"], message, "write `recompute: none`")


def _dora(view: View) -> Iterator[Problem]:
    if view.value("parallel.tensor") > 1 and view.task.text and view.value("tune.dora"):
        message = "`dora` needs norms of whole columns, and `tensor` splits the columns over processes"
        yield from view.at_each(["tune.dora", "parallel.tensor"], message, "write `dora: false`, or `tensor: 1`")


def _float8(view: View) -> Iterator[Problem]:
    recipe, method, precision = (view.value(f"{key}") for key in ("train.float8", "tune.method", "train.precision"))
    if recipe == "none" or not view.task.text:
        return
    if method != "full":
        message = f"`float8: {recipe}` rounds weights that are trained, and `tune: {method}` trains others beside them"
        yield from view.at_each(["train.float8", "tune.method"], message, "remove `float8`, or write `tune: full`")
    if precision in ("fp16", "fp64"):
        message = (
            f"`float8: {recipe}` needs bfloat16 or float32 for the other operations, and `precision` is {precision}"
        )
        yield from view.at_each(["train.float8", "train.precision"], message, "write `precision: bf16`")


TUNE_CHECKS: tuple[Callable[[View], Iterator[Problem]], ...] = (
    _quantised_base, _rounded_activations, _keys_of_other_methods, _layers, _virtual_tokens_whole, _dora, _float8,
)  # fmt: skip
