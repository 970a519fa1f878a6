"""Checks of templates and special tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from stoker.errors import Problem
from stoker.job.blocks.source_block import LogFormat, SourceBlock, TemplateBlock
from stoker.job.conflicts.conflict_view import View
from stoker.job.inputs import by_source_key
from stoker.job.keys.key_paths import parse_key
from stoker.job.role_template import BadTemplate, pieces_of


def _end_tokens(view: View) -> Iterator[Problem]:
    model = view.value("model")
    if model is None or model.special_tokens is None or None in (model.stop, model.special_tokens.eos):
        return
    stops = [model.stop] if isinstance(model.stop, str) else model.stop
    eos = model.special_tokens.eos
    if eos != stops[0]:
        message = f"`model.special_tokens.eos` is {eos!r}, but `model.stop` starts with {stops[0]!r}"
        yield from view.at_each(["model.special_tokens.eos", "model.stop"], message, "keep `stop`")


def _templates(view: View) -> Iterator[Problem]:
    for key, source in _sources(view).items():
        if isinstance(source.template, TemplateBlock):
            yield from _texts(view, f"{key}.template", source.template)
        if isinstance(source.template, TemplateBlock) or source.template in WITHOUT_ARGUMENTS:
            for name in source.template_arguments:
                path = (*parse_key(key), "template_arguments", name)
                yield view.document.problem(path, f"this template reads no `{name}`", "remove it")


def _texts(view: View, key: str, block: TemplateBlock) -> Iterator[Problem]:
    for role in TemplateBlock.model_fields:
        try:
            if (text := getattr(block, role)) is not None:
                pieces_of(role, text)
        except BadTemplate as error:
            yield view.document.problem(parse_key(f"{key}.{role}"), f"`{key}.{role}`: {error.message}", error.hint)


def _sources(view: View) -> dict[str, SourceBlock]:
    return by_source_key(view.value("data") or [], view.value("evaluate.data") or [])


def _rows_whole(view: View) -> Iterator[Problem]:
    """Pairs and answers with a label are compared whole, so a row cannot be split, nor be read as it comes."""
    kind = view.task.rows.kind(view.job)
    for key, source in _sources(view).items() if kind != "answers" else ():
        if source.too_long == "split":
            message = f"`too_long: split` would part the {WHOLE[kind]} of `task: {view.task.name}`"
            yield from view.at_each([f"{key}.too_long"], message, "write cut or drop")
        if source.stream is True:
            message = f"`task: {view.task.name}` reads {WHOLE[kind]}, which are not streamed"
            yield from view.at_each([f"{key}.stream"], message, "write `stream: false`")


def _log_formats(view: View) -> Iterator[Problem]:
    """Yields problems of click-log formats outside of ranking tasks, where keys of text have no effect."""
    logs = get_args(LogFormat)
    for key, source in _sources(view).items():
        if view.task.text and source.format in logs:
            message = f"`format: {source.format}` is of click logs, and `task: {view.task.name}` trains on text"
            yield from view.at_each([f"{key}.format", "task"], message, "write `task: ranking`, or another format")
        if not view.task.ranks:
            continue
        if source.format not in ("auto", *logs):
            message = f"`format: {source.format}` is of text, and `task: {view.task.name}` reads click logs"
            yield from view.at_each([f"{key}.format", "task"], message, f"write auto, {', '.join(logs)}")
        for name in TEXT_KEYS:
            if view.given(f"{key}.{name}"):
                message = f"`{key}.{name}` has no effect in `task: {view.task.name}`"
                yield from view.at_each([f"{key}.{name}"], message, "remove it")


def _trained_prompts(view: View) -> Iterator[Problem]:
    """Yields requests to train on prompts where no turn of the rows is trained: a policy learns from its answers."""
    for key, source in _sources(view).items() if view.task.rows.prompts else ():
        path = f"{key}.train_on"
        if source.train_on == "everything" and not view.is_recorded(path):
            message = f"`{path}` has no effect in `task: {view.task.name}`"
            yield from view.at_each([path], message, "remove it")


def _only_for_training(view: View) -> Iterator[Problem]:
    """Yields keys of held-out sources that only sources for training use."""
    for index, source in enumerate(view.value("evaluate.data") if view.task.text else ()):
        for name, written in (("weight", source.weight is not None), ("stream", source.stream is True)):
            key = f"evaluate.data[{index}].{name}"
            if written and not view.is_recorded(key):
                message = f"`{name}` has no effect in `evaluate.data`, whose rows are all read beforehand"
                yield from view.at_each([key], message, "remove it")


TEXT_KEYS = ("columns", "weight", "template", "template_arguments", "train_on", "special_tokens", "too_long", "stream")
WHOLE = {"pairs": "pairs", "judged": "answers with a label"}
WITHOUT_ARGUMENTS = ("chatml", "plain", "none")
TEXT_CHECKS: tuple[Callable[[View], Iterator[Problem]], ...] = (
    _end_tokens, _templates, _rows_whole, _log_formats, _trained_prompts, _only_for_training,
)  # fmt: skip
