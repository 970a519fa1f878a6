"""A row as it lies in a file, a row that was refused, and the examples that formats make of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Raw:
    """A row as it lies in its file, not yet looked at.

    Attributes:
        source: the file it stands in.
        row: counted from 1: the line in JSON lines, CSV and text (the first line of a row that has several),
            the item in JSON arrays, Parquet and catalogue files.
        value: the bytes of a line or document, or the columns where reading the file has already parted them.
    """

    source: str
    row: int
    value: bytes | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that cannot be used, and why: a short stable phrase first, the detail after a colon."""

    source: str
    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        extra: tool_calls, name, tool_call_id, reasoning_content and the like, untouched.
        trained: False where the row gives the turn the weight 0.
        place: the column that it stands in, ``messages[]`` where that is a list of turns.
    """

    role: Role
    content: str
    extra: dict[str, Any] = field(default_factory=dict)
    trained: bool = True
    place: str = field(default="", compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """As a call with its fields: several times faster than what dataclasses with slots do by themselves."""
        return Message, (self.role, self.content, self.extra, self.trained, self.place)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, the last one the assistant's, and the tools that were offered.

    Attributes:
        good: what the row's label says of the answer; None where nobody judged it.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    good: bool | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A document without turns."""

    text: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two continuations of one prompt, the first preferred to the second."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None


Example = Conversation | Text | Preference
