"""The outcome of a foreign file's key: carried over, dropped with a reason, or unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The precedence if two files set the same key: the command line, what an engine decides even so, the trainer's file,
# the engine's, then their defaults.
OVERRIDE, DECIDED, WRITTEN, ENGINE, DEFAULT, ENGINE_DEFAULT = 5, 4, 3, 2, 1, 0


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A value of the job and its origin.

    Attributes:
        target: the job's key, as ``train.lr`` or ``data[0].path``.
        value: the job's value.
        key: the source's key; empty if the value is a default, or an example.
        given: the source's value.
        note: the difference in meaning; empty if there is none.
        where: ``file:line:column``; empty for a default.
        tool: the name of the tool whose file it is; empty if no file has the value.
        strength: the precedence: the higher of two values wins.
    """

    target: str
    value: Any
    key: str = ""
    given: Any = None
    note: str = ""
    where: str = ""
    tool: str = ""
    strength: int

    def lost(self, why: str) -> Dropped:
        """Returns the report's entry if the job cannot have the value."""
        return Dropped(self.key or f"({self.target})", self.given or self.value, why, self.where, True)


@dataclass(frozen=True)
class Dropped:
    """A key without a counterpart, and why; ``matters`` if its loss changes the result of training or how it runs."""

    key: str
    value: Any
    why: str
    where: str = ""
    matters: bool = False


@dataclass(frozen=True)
class Unknown:
    """A key that the tool is not known to have, and its nearest known key."""

    key: str
    value: Any
    near: str
    where: str
