"""Converts foreign files to one job: recognises and reads each, merges their values, and checks the job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stoker.errors import Problem, UserError
from stoker.job.document.overrides import apply_overrides
from stoker.job.document.shorthand import expand_shorthands
from stoker.job.document.yaml_document import COMMAND_LINE, JobDocument, parse_document
from stoker.job.importers.accelerate import read_accelerate
from stoker.job.importers.axolotl import read_axolotl
from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.deepspeed import read_deepspeed
from stoker.job.importers.foreign_file import read_source
from stoker.job.importers.foreign_layout import settle_layout
from stoker.job.importers.key_outcomes import ENGINE, OVERRIDE, WRITTEN, Carried, Dropped, Unknown
from stoker.job.importers.llama_factory import read_llama_factory
from stoker.job.importers.recognise import format_of, recognise
from stoker.job.importers.torchtune import read_torchtune
from stoker.job.importers.trl import read_trl
from stoker.job.importers.write import as_blocks, write_job
from stoker.job.keys.annotations import block_of
from stoker.job.keys.key_paths import KeyPath, block_at, dotted, field_at
from stoker.job.keys.schema_errors import findings
from stoker.job.keys.suggest_key import suggest_key
from stoker.job.load_job import check_document
from stoker.job.schema import Job

READERS: dict[str, Callable[[JobDocument], ConfigReader]] = {
    "axolotl": read_axolotl,
    "trl": read_trl,
    "torchtune": read_torchtune,
    "deepspeed": read_deepspeed,
    "accelerate": read_accelerate,
}
# Keys that a job requires; DeepSpeed's and Accelerate's files do not contain them.
EXAMPLES = {"task": "sft", "model.name": "smollm2-135m", "data[0].path": "chatterbot-corpus"}
# Blocks whose keys are dropped if Stoker refuses them together with the others, in this order.
OPTIONAL = ("parallel", "checkpoint", "evaluate", "train", "tune", "model")


@dataclass(frozen=True)
class Imported:
    """A job made of foreign files.

    Attributes:
        text: the job's YAML, with the report as comments.
        job: the job's values, nested.
        carried: values from the files, and defaults of their tools.
        missing: the job's blocks that hold examples.
        tools: names of the files' tools.
    """

    text: str
    job: dict[str, Any]
    carried: tuple[Carried, ...]
    dropped: tuple[Dropped, ...]
    unknown: tuple[Unknown, ...]
    missing: tuple[str, ...]
    tools: tuple[str, ...]


def import_files(
    paths: Sequence[str | Path],
    *,
    format: str | None = None,
    data_info: str | None = None,
    processes: int | None = None,
    overrides: Sequence[str] = (),
) -> Imported:
    """Reads foreign files as one job.

    Args:
        format: of the first file; by default it is recognised by its keys, as for the others.
        data_info: LLaMA-Factory's register of data sets, or its folder.
        processes: number of processes, if the files do not give it.
        overrides: ``key=value`` of the job, which override all files.

    Raises:
        UserError: with every problem of the files, at its place.
    """
    configs = [_read(read_source(path), format if index == 0 else None, data_info) for index, path in enumerate(paths)]
    trainers = [config for config in configs if not config.engine]
    if len(trainers) > 1:
        tools = " and ".join(f"{config.document.file} ({config.tool})" for config in trainers)
        raise UserError(Problem(f"{tools} both say what is trained", "import them one by one"))
    problems = [problem for config in configs for problem in config.problems]
    if problems:
        raise UserError(*problems)
    values, dropped = _merged([item for config in configs for item in config.carried])
    dropped = [item for config in configs for item in config.dropped] + dropped
    values = _overridden(values, overrides)
    missing = [key for key in EXAMPLES if key not in values]
    values |= {key: Carried(target=key, value=EXAMPLES[key], strength=ENGINE) for key in missing}
    values, lost = _one_length(values)
    dropped += lost
    count = processes or next((config.processes for config in configs if config.processes), None)
    origin = "--processes" if processes else "of the processes that the files name"
    values, asides, lost = settle_layout(values, count, origin)
    values, refused = _accepted(values)
    dropped += [*lost, *refused]
    unknown = tuple(item for config in configs for item in config.unknown)
    blocks = tuple(map(_block, missing))
    names = ", ".join(f"{config.document.file} ({config.tool})" for config in configs)
    return Imported(
        text=write_job(values, asides, dropped, unknown, blocks, f"Imported from {names}."),
        job=as_blocks(values),
        carried=_reported(configs, values),
        dropped=tuple(dropped),
        unknown=unknown,
        missing=blocks,
        tools=tuple(config.tool for config in configs),
    )


def _read(document: JobDocument, format: str | None, data_info: str | None) -> ConfigReader:
    found = recognise(document) if format is None else format_of(format)
    if found == "llama-factory":
        return read_llama_factory(document, data_info)
    return READERS[found](document)


def _merged(carried: Iterable[Carried]) -> tuple[dict[str, Carried], list[Dropped]]:
    """Picks one value for each key of the job: the strongest, of equals the last; reports written values that lose."""
    values: dict[str, Carried] = {}
    dropped: list[Dropped] = []
    for entry in carried:
        other = values.get(entry.target)
        if other is None:
            values[entry.target] = entry
            continue
        winner, loser = (entry, other) if entry.strength >= other.strength else (other, entry)
        values[entry.target] = winner
        if loser.key and loser.value != winner.value:
            why = f"{winner.key or 'the default'} of {winner.tool} wins: `{entry.target}` is {winner.value}"
            dropped.append(Dropped(loser.key, loser.given, why, loser.where, winner.strength >= ENGINE))
    return values, dropped


def _overridden(values: dict[str, Carried], overrides: Sequence[str]) -> dict[str, Carried]:
    """Returns the values with those of the command line, whose sources replace all others."""
    written = _values_of(overrides)
    replaced = any(target.startswith("data[") for target in written)
    kept = {target: entry for target, entry in values.items() if not (replaced and target.startswith("data["))}
    return kept | written


def _values_of(overrides: Sequence[str]) -> dict[str, Carried]:
    document, problems = apply_overrides(JobDocument(COMMAND_LINE, {}, {}), overrides)
    values: dict[str, Carried] = {}
    for path, value in _leaves((), document.data):
        key = dotted(path)
        if field_at(path)[1] != path:
            near = suggest_key(path[:-1], str(path[-1]))
            problems.append(Problem(f"unknown key `{key}`", near.text, key=key, file=COMMAND_LINE))
        values[key] = Carried(target=key, value=value, key=key, given=value, where=COMMAND_LINE, strength=OVERRIDE)
    if problems:
        raise UserError(*problems)
    return values


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yields every key of the schema in an override, with its value; unknown keys with their whole value."""
    field, _ = field_at(path)
    if isinstance(value, dict) and block_at(path) is not None:
        for name, inner in value.items():
            yield from _leaves((*path, name), inner)
    elif isinstance(value, list) and field is not None and block_of(field.annotation)[1]:
        for index, inner in enumerate(value):
            yield from _leaves((*path, index), inner)
    else:
        yield path, value


def _one_length(values: dict[str, Carried]) -> tuple[dict[str, Carried], list[Dropped]]:
    """Keeps either steps or epochs: the one of higher precedence, or steps if both are equal."""
    steps, epochs = values.get("steps"), values.get("epochs")
    if steps is None or epochs is None:
        return values, []
    loser, winner = (epochs, steps) if steps.strength >= epochs.strength else (steps, epochs)
    kept = {target: entry for target, entry in values.items() if target != loser.target}
    return kept, [loser.lost(f"`{winner.target}` says how long")] if loser.key else []


def _reported(configs: Sequence[ConfigReader], values: dict[str, Carried]) -> tuple[Carried, ...]:
    """Returns what the job's values are carried from, in the files' order; of equal keys and targets the first."""
    shown = {(item.target, item.key) for item in values.values()}
    carried: dict[tuple[str, str], Carried] = {}
    for item in (*(one for config in configs for one in config.carried), *values.values()):
        if (item.target, item.key) in shown:
            carried.setdefault((item.target, item.key), item)
    return tuple(carried.values())


def _accepted(values: dict[str, Carried]) -> tuple[dict[str, Carried], list[Dropped]]:
    """Returns the values that Stoker accepts together, and those it refuses, with its reason.

    Raises:
        UserError: a value is invalid by itself, or dropping optional keys does not resolve a conflict.
    """
    values = dict(values)
    refused: list[Dropped] = []
    document = expand_shorthands(_document(values))
    try:
        Job.model_validate(document.data)
    except ValidationError as error:
        wrong = [Problem(f.message, f.suggestion, key=dotted(f.path)) for f in findings(error, document)]
        raise UserError(*(_at_source(problem, values) for problem in wrong)) from error
    while True:
        try:
            check_document(_document(values))
            return values, refused
        except UserError as error:
            optional = [key for key in values if _block(key) in OPTIONAL and key not in ("model.name", "tune.method")]
            options = [problem for problem in error.problems if problem.key in optional]
            if not options:
                raise UserError(*(_at_source(problem, values) for problem in error.problems)) from error
            weakest = min(
                options,
                key=lambda problem: (values[problem.key].strength >= WRITTEN, OPTIONAL.index(_block(problem.key))),
            )
            entry = values.pop(weakest.key)
            why = f"Stoker refuses it: {weakest.message}".split(" (see also")[0]
            refused.append(entry.lost(why))


def _block(key: str) -> str:
    return key.split(".", maxsplit=1)[0].split("[", maxsplit=1)[0]


def _document(values: dict[str, Carried]) -> JobDocument:
    return parse_document(write_job(values, (), (), (), (), "Imported."), "job.yaml")


def _at_source(problem: Problem, values: dict[str, Carried]) -> Problem:
    """Returns the problem at the place in the foreign file that its value is from."""
    entry = values.get(problem.key)
    if entry is None or not entry.where:
        return Problem(problem.message, problem.suggestion, key=problem.key)
    found = re.fullmatch(r"(.*):(\d+):(.*)", entry.where)
    file, line, column = (found[1], int(found[2]), int(found[3])) if found else (entry.where, 0, 0)
    what = f"`{entry.key}`: {problem.message}" if entry.key else problem.message
    return Problem(what, problem.suggestion, key=problem.key, file=file, line=line, column=column)
