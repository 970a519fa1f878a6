"""Keys that are each well written but cannot stand together, and numbers that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stoker.errors import Problem
from stoker.job.batch import BatchError
from stoker.job.document import Document
from stoker.job.keys import KeyPath, dotted, field_at, parse_key
from stoker.job.schema import Job, TuneBlock
from stoker.job.triangle import triangle_of

ADAPTER_KEYS = tuple(name for name in TuneBlock.model_fields if name != "method")


class CannotTellError(Exception):
    """A conflict hangs on a key that is itself wrong, which has been reported already."""


class View:
    """A job under judgement: its values, which of them were written, and which are wrong by themselves."""

    def __init__(self, job: Job, document: Document, wrong: set[KeyPath]) -> None:
        self.job, self.document, self.wrong = job, document, wrong

    def value(self, key: str) -> Any:
        """The value of a key, written or default; None inside a block that is not there."""
        path = self._known(key)
        value: Any = self.job
        for part in path:
            value = value[part] if isinstance(part, int) else getattr(value, part, None)
        return value

    def given(self, key: str) -> bool:
        """Whether a value that is not ``auto`` was written."""
        path = self._known(key)
        try:
            return self.document.at(path) not in (None, "auto")
        except KeyError:
            return False

    def _known(self, key: str) -> KeyPath:
        path = parse_key(key)
        if any(path[: len(wrong)] == wrong for wrong in self.wrong):
            raise CannotTellError(key)
        return path

    def at_each(self, keys: list[str], message: str, suggestion: str) -> Iterator[Problem]:
        """The same problem at the place of every key that was written; at the first key's where none was."""
        places = [(key, where) for key in keys if (where := self.document.where(parse_key(key)))]
        for key, where in places or [(keys[0], "")]:
            others = ", ".join(other for _, other in places if other != where)
            also = f" (see also {others})" if others else ""
            yield self.document.problem(parse_key(key), f"{message}{also}", suggestion)


def conflicts(view: View) -> list[Problem]:
    """Every conflict that can be judged, in no order."""
    problems: list[Problem] = []
    for check in CHECKS:
        try:
            problems.extend(check(view))
        except CannotTellError:
            continue
    return problems


def _steps_and_epochs(view: View) -> Iterator[Problem]:
    if view.given("steps") and view.given("epochs"):
        message = "`steps` and `epochs` both say how long to train"
        yield from view.at_each(["steps", "epochs"], message, "keep one; on the command line `steps=` takes it away")


def _needs_model(view: View) -> Iterator[Problem]:
    task = view.value("task")
    if task != "module" and view.value("model") is None:
        yield view.document.problem(("model",), f"`task: {task}` needs a model", "write `model: smollm2-135m`")


def _needs_data(view: View) -> Iterator[Problem]:
    task = view.value("task")
    if task != "module" and not view.value("data"):
        yield view.document.problem(("data",), f"`task: {task}` needs data", "write `data: my.jsonl`")


def _module_block(view: View) -> Iterator[Problem]:
    task, block = view.value("task"), view.value("module")
    if task == "module" and block is None:
        hint = "write `module:` with `model`, `loss` and `data` as import paths (package.module:name)"
        yield view.document.problem(("module",), "`task: module` needs the block `module`", hint)
    if task != "module" and block is not None:
        yield from view.at_each(
            ["module", "task"],
            f"`module` has no effect in `task: {task}`",
            "remove it or write `task: module`",
        )


def _module_without(view: View) -> Iterator[Problem]:
    if view.value("task") != "module":
        return
    instead = {
        "model": "name the callable in `module.model`",
        "data": "name the callable in `module.data`",
        "evaluate.data": "name the callable in `module.evaluate`",
    }
    for key in ("model", "data", "tune", "mix", "evaluate.data", "train.seq_len", "train.pack"):
        if view.given(key) and view.document.at(parse_key(key)) not in ({}, []):
            yield from view.at_each([key], f"`{key}` has no effect in `task: module`", instead.get(key, "remove it"))


def _import_paths(view: View) -> Iterator[Problem]:
    block = view.value("module")
    for name in ("model", "loss", "data", "evaluate") if block is not None else ():
        key = f"module.{name}"
        path = view.value(key)
        package, _, attribute = (path or "").partition(":")
        words = [*package.split("."), *attribute.split(".")]
        if path is not None and not all(word.isidentifier() for word in words):
            yield view.document.problem(parse_key(key), f"`{path}` is no import path", "write `package.module:name`")


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


def _adapter_keys_without_adapter(view: View) -> Iterator[Problem]:
    if view.value("task") == "module" or view.value("tune.method") != "full":
        return
    for name in ADAPTER_KEYS:
        if view.given(f"tune.{name}"):
            message = f"`tune.{name}` has no effect in `tune: full`"
            yield from view.at_each([f"tune.{name}"], message, "write `method: lora` beside it, or remove it")


def _weights(view: View) -> Iterator[Problem]:
    sources = view.value("data") or []
    weighted = [index for index in range(len(sources)) if view.value(f"data[{index}].weight") is not None]
    bare = [index for index in range(len(sources)) if index not in weighted]
    if weighted and bare:
        for index in bare:
            yield view.document.problem(
                ("data", index),
                f"`data[{index}]` has no `weight`, and others have",
                "give all sources a weight, or none",
            )
    if weighted and view.given("mix.temperature"):
        keys = ["mix.temperature", *(f"data[{index}].weight" for index in weighted)]
        yield from view.at_each(keys, "`mix.temperature` and weights both say how to mix", "keep one of them")


def _two_evaluations(view: View) -> Iterator[Problem]:
    fraction = view.value("evaluate.fraction")
    held_out = (
        "evaluate.data" if view.value("evaluate.data") else "module.evaluate" if view.value("module.evaluate") else ""
    )
    if held_out and view.given("evaluate.fraction") and fraction > 0:
        message = f"`{held_out}` and `evaluate.fraction` both say what to evaluate on"
        yield from view.at_each([held_out, "evaluate.fraction"], message, "keep one of them")


def _warmup(view: View) -> Iterator[Problem]:
    warmup, steps = view.value("train.warmup"), view.value("steps")
    if steps is not None and isinstance(warmup, int) and warmup >= steps:
        message = f"`train.warmup` of {warmup} steps never ends within `steps: {steps}`"
        yield from view.at_each(
            ["train.warmup", "steps"], message, f"write at most {steps - 1}, or a fraction such as 0.1"
        )


def _batch(view: View) -> Iterator[Problem]:
    corners = [f"train.{name}" for name in ("batch", "micro_batch", "accumulation")]
    written = [key for key in (*corners, "parallel.data") if view.given(key)]
    view.value("task"), view.value("train.seq_len")
    try:
        triangle_of(view.job)
    except BatchError as error:
        yield from view.at_each(written, error.message, error.suggestion)


CHECKS: tuple[Callable[[View], Iterator[Problem]], ...] = (
    _steps_and_epochs, _needs_model, _needs_data, _module_block, _module_without, _import_paths,
    _quantised_base, _adapter_keys_without_adapter, _weights, _two_evaluations, _warmup, _batch,
)  # fmt: skip


def has_effect(job: Job, path: KeyPath) -> bool:
    """Whether a key changes anything in this job: an adapter's keys do nothing in full tuning, and so on."""
    if job.task == "module":
        return dotted(path) not in ("model", "data", "train.seq_len", "train.pack", "evaluate.data") and path[
            0
        ] not in ("tune", "mix")
    if path[0] == "tune" and path[-1] in ADAPTER_KEYS:
        return job.tune.method != "full"
    return path[0] != "module" and field_at(path)[0] is not None
