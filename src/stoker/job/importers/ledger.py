"""What became of every key of a foreign file: carried over, dropped with a reason, or unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import Problem
from stoker.job.key_paths import KeyPath, dotted, parse_key
from stoker.job.schema_errors import SPELT_FALSE, SPELT_TRUE, shown
from stoker.job.yaml_document import JobDocument

# Who wins where two files say the same key: the command line, the trainer's file, the engine's, then their defaults.
OVERRIDE, WRITTEN, ENGINE, DEFAULT, ENGINE_DEFAULT = 4, 3, 2, 1, 0
NOT_SET = "not set"


@dataclass(frozen=True)
class Carried:
    """A value of the job and where it is from.

    Attributes:
        target: the job's key, as ``train.lr`` or ``data[0].path``.
        value: the job's value.
        key: the source's key; empty where the value is the source's own default.
        given: the source's value.
        note: what differs in meaning; empty where nothing does.
        where: ``file:line:column``; empty for a default.
        tool: the name of the tool whose file it is.
        strength: which of two values wins.
    """

    target: str
    value: Any
    key: str
    given: Any
    note: str
    where: str
    tool: str
    strength: int


@dataclass(frozen=True)
class Dropped:
    """A key without a counterpart, and why; ``matters`` where its loss changes what is learnt or how it runs."""

    key: str
    value: Any
    why: str
    where: str = ""
    matters: bool = False


@dataclass(frozen=True)
class Unknown:
    """A key that the source's tool is not known to have, and the nearest that it has."""

    key: str
    value: Any
    near: str
    where: str


@dataclass
class Ledger:
    """One file while it is read. Values are asked for by key, and every key ends in one of three lists.

    Attributes:
        tool: the name of the tool, for people.
        engine: whether the file says how training is spread (DeepSpeed, Accelerate) rather than what is trained.
        processes: how many processes the file says there are.
        asides: keys and values of the job that the file asks for but leaves incomplete; shown switched off.
    """

    document: JobDocument
    tool: str
    engine: bool = False
    carried: list[Carried] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    unknown: list[Unknown] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    processes: int | None = None
    _done: set[KeyPath] = field(default_factory=set)
    _asked: set[str] = field(default_factory=set)

    def value(self, key: str | KeyPath) -> Any:
        """What was written at a key; None where nothing was."""
        path = _path(key)
        self._asked.add(_name(path))
        try:
            return self.document.at(path)
        except KeyError:
            return None

    def number(self, key: str | KeyPath) -> float | None:
        """A number, also one in quotes, as 1e-4 is to YAML 1.1."""
        value = self.value(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        try:
            return float(value) if isinstance(value, str) else self._wrong(key, "a number")
        except ValueError:
            return self._wrong(key, "a number")

    def whole(self, key: str | KeyPath) -> int | None:
        """A whole number."""
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
        """A text; None where it is empty."""
        value = self.value(key)
        if isinstance(value, dict | list):
            return self._wrong(key, "a single text")
        return None if value in (None, "") else str(value)

    def words(self, key: str | KeyPath) -> list[str]:
        """A list of texts, also where it is written with commas in one."""
        value = self.value(key)
        if isinstance(value, str):
            return [word.strip() for word in value.split(",") if word.strip()]
        if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
            return [str(item) for item in value]
        if value is not None:
            self._wrong(key, "a list of words")
        return []

    def carry(self, key: str | KeyPath, target: str, value: Any, note: str = "") -> None:
        """The key's value goes to the job's key ``target`` as ``value``."""
        path = _path(key)
        self._done.add(path)
        strength = ENGINE if self.engine else WRITTEN
        given = self.document.at(path)
        self.carried.append(
            Carried(target, value, dotted(path), given, note, self.document.where(path), self.tool, strength)
        )

    def number_to(self, key: str | KeyPath, target: str, default: float | None = None, note: str = "") -> float | None:
        """Carries a number to a key of the job, or the tool's default where none was written; returns what was."""
        return self._pass(key, target, self.number(key), default, note, float)

    def whole_to(self, key: str | KeyPath, target: str, default: int | None = None, note: str = "") -> int | None:
        """The same for a whole number."""
        return self._pass(key, target, self.whole(key), default, note, int)

    def flag_to(self, key: str | KeyPath, target: str, default: bool | None = None, note: str = "") -> bool | None:
        """The same for true or false."""
        return self._pass(key, target, self.flag(key), default, note, bool)

    def text_to(self, key: str | KeyPath, target: str) -> str | None:
        """The same for a text, without a default."""
        return self._pass(key, target, self.text(key), None, "", str)

    def _pass(self, key: str | KeyPath, target: str, value: Any, default: Any, note: str, kind: type) -> Any:
        if value is not None:
            self.carry(key, target, kind(value), note)
        elif default is not None and self.value(key) is None:
            self.default(target, default, note)
        return value

    def idle(self, why: str, *keys: str | KeyPath) -> None:
        """Drops those of the keys that were written and not handled yet, without loss."""
        for key in keys:
            if self.value(key) is not None and not self.handled(key):
                self.drop(key, why)

    def also(self, target: str, value: Any, note: str = "", *, key: str | KeyPath | None = None) -> None:
        """A further value that the key carried last brings with it; or another key, which may do so repeatedly."""
        last = self.carried[-1]
        origin = (last.key, last.given, last.where)
        if key is not None:
            path = _path(key)
            self._done.add(path)
            origin = (dotted(path), self.document.at(path), self.document.where(path))
        self.carried.append(
            Carried(target, value, origin[0], origin[1], note, origin[2], self.tool, ENGINE if self.engine else WRITTEN)
        )

    def default(self, target: str, value: Any, note: str = "") -> None:
        """What the tool does where its file says nothing, and Stoker would do otherwise."""
        strength = ENGINE_DEFAULT if self.engine else DEFAULT
        self.carried.append(Carried(target, value, "", None, note, "", self.tool, strength))

    def drop(self, key: str | KeyPath, why: str, *, matters: bool = False) -> None:
        """The key has no counterpart. A key that was not written stands for the tool's default."""
        path = _path(key)
        self._done.add(path)
        value = self.value(path)
        self.dropped.append(Dropped(dotted(path), value, why, self.document.where(path), matters))

    def handled(self, key: str | KeyPath) -> bool:
        """Whether a key was carried or dropped."""
        return _path(key) in self._done

    def sweep(self, *tables: Mapping[str, str], matters: Mapping[str, str] | None = None) -> None:
        """Sorts what is left: keys of the tables are dropped for their reason, others are unknown.

        Args:
            tables: from a reason to the names it applies to, parted by spaces; a name may end in ``.*``.
            matters: the same for keys whose loss changes what is learnt, unless they are switched off.
        """
        plain = {name: why for table in tables for why, names in table.items() for name in names.split()}
        grave = {name: why for why, names in (matters or {}).items() for name in names.split()}
        known = sorted({name.removesuffix(".*").split(".")[-1] for name in (*self._asked, *plain, *grave)})
        for path, value in self._left():
            text = dotted(path)
            why, is_grave = _reason(path, plain), False
            if why is None and (why := _reason(path, grave)) is not None:
                is_grave = value not in (None, False, 0, "", [], {}, "no", "none")
            if why is not None:
                self.drop(path, why if value is not None else NOT_SET, matters=is_grave)
            elif _name(path) in self._asked:
                self.drop(path, NOT_SET if value is None else "no effect beside the other keys")
            else:
                near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.75)
                near = [name for name in near if name != path[-1]]
                self.unknown.append(Unknown(text, value, near[0] if near else "", self.document.where(path)))

    def problem(self, key: str | KeyPath, message: str, suggestion: str = "") -> None:
        """Keeps a problem at the key's value; its key counts as handled."""
        path = _path(key)
        self._done.add(path)
        self.problems.append(self.document.problem(path, message, suggestion))

    def _wrong(self, key: str | KeyPath, kind: str) -> Any:
        path = _path(key)
        if path not in self._done:
            self.problem(path, f"`{dotted(path)}` must be {kind}, not {shown(self.document.at(path))}")
        return None

    def _left(self) -> Iterator[tuple[KeyPath, Any]]:
        if self.document.data:
            yield from self._leaves((), self.document.data)

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


def _path(key: str | KeyPath) -> KeyPath:
    return parse_key(key) if isinstance(key, str) else key


def _name(path: KeyPath) -> str:
    """The path without the numbers of lists."""
    return ".".join(part for part in path if isinstance(part, str))


def _reason(path: KeyPath, reasons: Mapping[str, str]) -> str | None:
    """The reason of a key: its own, or that of a block it stands in."""
    parts = _name(path).split(".")
    for end in range(len(parts), 0, -1):
        block = ".".join(parts[:end])
        if block in reasons:
            return reasons[block]
        if f"{block}.*" in reasons:
            return reasons[f"{block}.*"]
    return None
