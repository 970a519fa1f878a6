"""A row as read from a file, a rejected row, and the examples that formats parse rows into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Raw:
    """A row as read from its file, not yet parsed.

    Attributes:
        source: its file.
        row: counted from 1: the line in JSON lines, CSV and text (the first line of a row that has several),
            the item in JSON arrays, Parquet and catalogue files.
        value: the bytes of a line or document, or columns where reading the file already separates them.
        others: numbers of further rows of the file that are joined to this one.
    """

    source: str
    row: int
    value: bytes | dict[str, Any]
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that cannot be used, and why: a short stable phrase first, the detail after a colon."""

    source: str
    row: int
    reason: str


def names_file(name: str, file: str) -> bool:
    """Returns whether a name is that of a file, with or without its folders."""
    return file == name or file.endswith(f"/{name}")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        extra: tool_calls, name, tool_call_id, reasoning_content and the like, untouched.
        trained: False if the row gives the turn the weight 0.
        place: its column, ``messages[]`` if that is a list of turns.
    """

    role: Role
    content: str
    extra: dict[str, Any] = field(default_factory=dict)
    trained: bool = True
    place: str = field(default="", compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as a call with its fields: several times faster than the default of dataclasses with slots."""
        return Message, (self.role, self.content, self.extra, self.trained, self.place)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, the last one the assistant's, and the tools that were offered.

    Attributes:
        good: whether the row's label marks the answer as good; None without a label.
        after: number of turns after the last answer, which are left out.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    good: bool | None = None
    after: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Text:
    """A document without turns."""

    text: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two continuations of one prompt, the first preferred to the second.

    Attributes:
        margin: how much better the first is, on the row's own scale; 0 if the row does not state it.
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Ranking:
    """Several continuations of one prompt.

    Attributes:
        pairs: (better answer, worse answer, margin) of each pair that is not a tie; answers by number, the margin on
            the row's own scale, 0 if the row does not state it.
        sampled: whether the pairs are a sample, because there are too many of them.
    """

    prompt: tuple[Message, ...]
    answers: tuple[tuple[Message, ...], ...]
    pairs: tuple[tuple[int, int, float], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    sampled: bool = False


Chat = Conversation | Preference | Ranking
Example = Chat | Text
