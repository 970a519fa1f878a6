"""Reads a foreign file by key and records the outcome of each key."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.errors import Problem
from stoker.job.document.yaml_document import JobDocument
from stoker.job.importers.key_outcomes import (
    DECIDED,
    DEFAULT,
    ENGINE,
    ENGINE_DEFAULT,
    WRITTEN,
    Carried,
    Dropped,
    Unknown,
)
from stoker.job.keys.annotations import accepts
from stoker.job.keys.key_paths import KeyPath, dotted, field_at, parse_key
from stoker.job.keys.schema_errors import SPELT_FALSE, SPELT_TRUE, shown_value
from stoker.json_values import finite_number

NOT_SET = "not set"
Reasons = Mapping[str, str]  # from a reason to the keys it applies to, separated by spaces; a key may end in ".*"


@dataclass
class ConfigReader:
    """A reader of one file. Values are read by key, and every key ends up carried, dropped or unknown.

    Attributes:
        tool: the name of the tool, as reports print it.
        engine: whether the file describes the distribution (DeepSpeed, Accelerate) rather than the training.
        processes: the number of processes that the file gives.
        within: the block in which keys written as text are looked up.
    """

    document: JobDocument
    tool: str
    engine: bool = False
    carried: list[Carried] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    unknown: list[Unknown] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    processes: int | None = None
    within: KeyPath = ()
    _done: set[KeyPath] = field(default_factory=set)
    _asked: set[str] = field(default_factory=set)

    def block(self, path: KeyPath) -> ConfigReader:
        """Returns a reader that looks keys up in the block at ``path``."""
        return replace(self, within=path)

    def path(self, key: str | KeyPath) -> KeyPath:
        """Returns a key's path from the top of the file."""
        return (*self.within, *parse_key(key)) if isinstance(key, str) else key

    def value(self, key: str | KeyPath) -> Any:
        """Returns the value of a key; None if it was not written."""
        path = self.path(key)
        self._asked.add(_name(path))
        try:
            return self.document.at(path)
        except KeyError:
            return None

    def number(self, key: str | KeyPath) -> float | None:
        """Returns a finite number, also one in quotes, as 1e-4 is to YAML 1.1."""
        value = self.value(key)
        with suppress(ValueError):
            value = float(value) if isinstance(value, str) else value
        if value is None or finite_number(value) is not None:
            return value
        return self._wrong(key, "a number")

    def whole(self, key: str | KeyPath) -> int | None:
        """Returns a whole number."""
        value = self.number(key)
        if value is None or float(value).is_integer():
            return None if value is None else int(value)
        return self._wrong(key, "a whole number")

    def flag(self, key: str | KeyPath) -> bool | None:
        """True or false, in YAML 1.1's spellings as well."""
        value = self.value(key)
        word = str(value).lower()
        if value is None or isinstance(value, bool):
            return value
        if word in (*SPELT_TRUE, *SPELT_FALSE, "1", "0"):
            return word in (*SPELT_TRUE, "1")
        return self._wrong(key, "true or false")

    def text(self, key: str | KeyPath) -> str | None:
        """Returns a text value; None if it is empty."""
        value = self.value(key)
        if isinstance(value, dict | list):
            return self._wrong(key, "a single text")
        return None if value in (None, "") else str(value)

    def words(self, key: str | KeyPath) -> list[str]:
        """Returns a list of texts, which may also be written as one text with commas."""
        value = self.value(key)
        if isinstance(value, str):
            return [word.strip() for word in value.split(",") if word.strip()]
        if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
            return [str(item) for item in value]
        if value is not None:
            self._wrong(key, "a list of words")
        return []

    def carry(self, key: str | KeyPath, target: str, value: Any, note: str = "", *, decides: bool = False) -> None:
        """Carries a key to the job's key ``target`` as ``value``.

        Args:
            decides: whether the tool follows this file even if the trainer's file says something else.
        """
        path = self.path(key)
        self._done.add(path)
        self.carried.append(
            Carried(
                target=target,
                value=value,
                key=dotted(path),
                given=self.document.at(path),
                note=note,
                where=self.document.where(path),
                tool=self.tool,
                strength=DECIDED if decides else ENGINE if self.engine else WRITTEN,
            )
        )

    def also(self, target: str, value: Any, note: str = "") -> None:
        """Adds a further value that the key carried last implies."""
        strength = ENGINE if self.engine else WRITTEN
        self.carried.append(replace(self.carried[-1], target=target, value=value, note=note, strength=strength))

    def default(self, target: str, value: Any, note: str = "") -> None:
        """Adds a default of the tool, for a key that its file omits and that Stoker decides otherwise."""
        strength = ENGINE_DEFAULT if self.engine else DEFAULT
        self.carried.append(Carried(target=target, value=value, note=note, tool=self.tool, strength=strength))

    def sets(self, target: str) -> bool:
        """Returns whether the job's key ``target`` has a value."""
        return any(item.target == target for item in self.carried)

    def take(self, key: str | KeyPath, target: str, default: Any = None, note: str = "") -> Any:
        """Carries a value, read as the type of ``target``, or else the tool's default; returns the written value."""
        field = field_at(parse_key(target))[0]
        assert field is not None, target
        kind, read = next(
            ((kind, read) for kind, read in _READERS if accepts(field.annotation, kind)), (str, ConfigReader.text)
        )
        value = read(self, key)
        if value is not None:
            self.carry(key, target, kind(value), note)
        elif default is not None and self.value(key) is None:
            self.default(target, default, note)
        return value

    def take_all(self, *rows: tuple[str, str] | tuple[str, str, Any]) -> None:
        """Takes rows of a key, its target and perhaps the tool's default."""
        for row in rows:
            self.take(*row)

    def switch(self, key: str | KeyPath, target: str, value: Any, note: str = "", *, off: str = "off") -> bool | None:
        """Carries ``value`` if a flag is true, and drops the flag if it is false; returns the flag."""
        asked = self.flag(key)
        if asked:
            self.carry(key, target, value, note)
        elif asked is not None:
            self.drop(key, off)
        return asked

    def drop(self, key: str | KeyPath, why: str, *, matters: bool = False) -> None:
        """Drops a key that has no counterpart, if it was written."""
        if self.value(key) is not None:
            self.leave(key, why, matters=matters)

    def idle(self, why: str, *keys: str | KeyPath) -> None:
        """Drops without loss those of the keys that were written and are not handled yet."""
        for key in keys:
            if not self.handled(key):
                self.drop(key, why)

    def leave(self, key: str | KeyPath, why: str, *, matters: bool = False) -> None:
        """Drops a key whether or not it was written: one that was not means the tool's default."""
        path = self.path(key)
        self._done.add(path)
        self.dropped.append(Dropped(dotted(path), self.value(path), why, self.document.where(path), matters))

    def drop_listed(self, free: Reasons, lost: Reasons) -> None:
        """Drops the keys of this block for the reasons of two tables; a loss by the second matters."""
        for table, matters in ((free, False), (lost, True)):
            for why, names in table.items():
                for name in names.split():
                    if name in self.document.at(self.within) and not self.handled(name):
                        is_set = self.value(name) not in (None, False, "", [], {})
                        self.leave(name, why if is_set else NOT_SET, matters=matters and is_set)

    def handled(self, key: str | KeyPath) -> bool:
        """Returns whether a key was carried or dropped."""
        return self.path(key) in self._done

    def sweep(self, free: Sequence[Reasons], lost: Sequence[Reasons]) -> None:
        """Sorts the remaining keys: keys in a table are dropped for its reason, others are unknown.

        Args:
            lost: keys whose loss changes the training, unless they are switched off.
        """
        plain, grave = (
            {name: why for table in tables for why, names in table.items() for name in names.split()}
            for tables in (free, lost)
        )
        known = sorted({name.removesuffix(".*").split(".")[-1] for name in (*self._asked, *plain, *grave)})
        for path, value in self._leaves((), self.document.data) if self.document.data else ():
            why, is_grave = _reason(path, plain), False
            if why is None and (why := _reason(path, grave)) is not None:
                is_grave = value not in (None, False, 0, "", [], {}, "no", "none")
            if why is not None:
                self.leave(path, why if value is not None else NOT_SET, matters=is_grave)
            elif _name(path) in self._asked:
                self.leave(path, NOT_SET if value is None else "no effect beside the other keys")
            else:
                near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.75)
                near = [name for name in near if name != path[-1]]
                self.unknown.append(Unknown(dotted(path), value, near[0] if near else "", self.document.where(path)))

    def problem(self, key: str | KeyPath, message: str, suggestion: str = "", *, missing_file: str = "") -> None:
        """Records a problem at the key's value; its key counts as handled."""
        path = self.path(key)
        self._done.add(path)
        self.problems.append(replace(self.document.problem(path, message, suggestion), missing_file=missing_file))

    def absorb(self, other: ConfigReader) -> None:
        """Adds the outcomes of another file's keys, which this one refers to."""
        self.carried += other.carried
        self.dropped += other.dropped
        self.unknown += other.unknown
        self.problems += other.problems
        self.processes = self.processes or other.processes

    def _wrong(self, key: str | KeyPath, kind: str) -> Any:
        path = self.path(key)
        if path not in self._done:
            self.problem(path, f"`{dotted(path)}` must be {kind}, not {shown_value(self.document.at(path))}")
        return None

    def _leaves(self, path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
        if path in self._done:
            return
        items: Any = None
        if isinstance(value, dict) and value:
            items = value.items()
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            items = enumerate(value)
        if items is None:
            yield path, value
            return
        for key, inner in items:
            yield from self._leaves((*path, key), inner)


def _name(path: KeyPath) -> str:
    """Returns the path without the numbers of lists."""
    return ".".join(part for part in path if isinstance(part, str))


def _reason(path: KeyPath, reasons: Reasons) -> str | None:
    """Returns the reason of a key: its own, or that of a block around it."""
    parts = _name(path).split(".")
    blocks = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((reasons[name] for block in blocks for name in (block, f"{block}.*") if name in reasons), None)


# How a value is read, by the type of its target; int before float, for a number of steps that may be a fraction.
_READERS: tuple[tuple[type, Callable[[ConfigReader, str | KeyPath], Any]], ...] = (
    (int, ConfigReader.whole), (float, ConfigReader.number), (bool, ConfigReader.flag),
)  # fmt: skip
