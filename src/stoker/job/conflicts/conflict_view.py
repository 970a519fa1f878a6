"""A job as the checks for conflicts see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.errors import Problem
from stoker.job.block import default_of
from stoker.job.document.yaml_document import JobDocument
from stoker.job.keys.key_paths import KeyPath, dotted, parse_key
from stoker.job.run_records import is_of_run
from stoker.job.schema import Job
from stoker.job.task_spec import TASKS, TaskSpec


class CannotTellError(Exception):
    """A conflict depends on a key that is itself wrong, which has been reported already."""


class View:
    """A job under validation: its values, the keys that were written, and those that are invalid by themselves."""

    def __init__(self, job: Job, document: JobDocument, wrong: set[KeyPath]) -> None:
        self.job, self.document, self.wrong = job, document, wrong

    @property
    def task(self) -> TaskSpec:
        """The job's task."""
        return TASKS[self.value("task")]

    def value(self, key: str) -> Any:
        """Returns the value of a key, written or default; None inside a missing block."""
        path = self._known(key)
        value: Any = self.job
        for part in path:
            value = value[part] if isinstance(part, int) else getattr(value, part, None)
        return value

    def given(self, key: str) -> bool:
        """Returns whether a value other than ``auto`` was written."""
        path = self._known(key)
        try:
            return self.document.at(path) not in (None, "auto")
        except KeyError:
            return False

    def is_recorded(self, key: str) -> bool:
        """Returns whether a run's own ``job.yaml`` has the key: earlier versions also recorded keys without effect."""
        mark = self.document.marks.get(parse_key(key))
        return mark is not None and not mark.override and is_of_run(Path(mark.file))

    def differs(self, key: str) -> bool:
        """Returns whether a key was written with a value other than its default."""
        *above, name = parse_key(key)
        return self.given(key) and self.value(key) != default_of(type(self.value(dotted(tuple(above)))), str(name))

    def _known(self, key: str) -> KeyPath:
        path = parse_key(key)
        if any(path[: len(wrong)] == wrong for wrong in self.wrong):
            raise CannotTellError(key)
        return path

    def at_each(self, keys: list[str], message: str, suggestion: str) -> Iterator[Problem]:
        """Yields a problem at each place where a key is written; at the first key's place if none is written.

        Each names the other places, and those after the first repeat it.
        """
        places = {where: key for key in reversed(keys) if (where := self.document.where(parse_key(key)))}
        for number, (where, key) in enumerate(list(places.items())[::-1] or [("", keys[0])]):
            others = ", ".join(other for other in list(places)[::-1] if other != where)
            also = f" (see also {others})" if others else ""
            problem = self.document.problem(parse_key(key), f"{message}{also}", suggestion)
            yield replace(problem, repeats=number > 0)
