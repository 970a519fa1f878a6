"""The expected answer of a row, with which rewards and scorers compare the model's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.data.files.rows import Conversation, Example, Message
from stoker.data.formats.messages import Refused, has_content, messages_in

EXPECTED = (
    "expected",
    "expected_answer",
    "answer",
    "answers",
    "completion",
    "output",
    "target",
    "reference",
    "references",
    "response",
)


def as_text(value: Any) -> str:
    """Converts a column's value to text; other types as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def expected_of(fields: Mapping[str, Any]) -> Any:
    """Returns the expected answer from a row's columns, of a list of messages the last one's content; None without."""
    name = next((name for name in EXPECTED if has_content(fields.get(name))), None)
    if name is None or not isinstance(fields[name], list):
        return None if name is None else fields[name]
    try:
        turns = messages_in(fields[name], name)
    except Refused:
        turns = None  # other objects
    return turns[-1].content or None if turns else fields[name]


def split_answer(turns: Sequence[Message], fields: Mapping[str, Any]) -> tuple[Sequence[Message], Any]:
    """Returns a row's turns before its last answer, and the expected answer: from a column, else that last answer.

    The expected answer is None without either, as for a last answer of tool calls alone.
    """
    named = expected_of(fields)
    if not turns or turns[-1].role != "assistant":
        return turns, named
    return turns[:-1], (turns[-1].content or None) if named is None else named


def prompt_and_expected(example: Example | str, fields: Mapping[str, Any]) -> tuple[Sequence[Message], Any]:
    """Returns a parsed row's prompt, and its expected answer; None without, see `split_answer`.

    If the row's label says that its answer is bad, only the column ``expected`` has another one.
    """
    if not isinstance(example, Conversation):
        return (), expected_of(fields)
    if example.good is False:
        return example.messages[:-1], expected_of({"expected": fields.get("expected")})
    return split_answer(example.messages, fields)
