"""From a row's columns to a conversation, a document or a preference, or to the reason why not.

| format | columns |
| --- | --- |
| instruction | instruction, output; optionally input, system, history ([[question, answer], ...]) |
| messages | messages: [{role, content, ...}]; optionally tools |
| sharegpt | conversations: [{from, value}]; optionally system, tools |
| prompt | prompt, completion: each text or a list of messages |
| text | text |
| preference | chosen, rejected, and prompt: each text or a list of messages |

Some other names that published data sets use for these columns are understood too (`ALIASES`). Lists may also
stand as JSON in a string, as they have to in CSV.

Decisions: an input follows its instruction after a blank line. Turns after the assistant's last are cut,
since nothing is trained after them. An empty system message is left out. Two turns of one role in a row
are kept: whether that can be said is the chat template's to decide.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.data.record import Conversation, Example, Message, Preference, Text
from stoker.data.turns import (
    Refused,
    from_value_messages,
    is_message,
    parsed,
    role_messages,
    text_of,
    tools_of,
    trained,
)
from stoker.errors import Problem, UserError

# Needed columns of each format, in the order in which a row that fits several is taken.
NEEDED: dict[str, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}
ALIASES: dict[tuple[str, str], tuple[str, ...]] = {
    ("messages", "messages"): ("conversations", "conversation"),
    ("sharegpt", "conversations"): ("conversation", "messages"),
    ("instruction", "instruction"): ("question", "query", "prompt"),
    ("instruction", "input"): ("context",),
    ("instruction", "output"): ("response", "answer"),
    ("text", "text"): ("content", "document"),
}


def detect(rows: Sequence[dict[str, Any] | str], columns: Mapping[str, str] | None = None) -> str:
    """The format that most of `rows` have the columns of.

    Args:
        columns: the job's `{our name: the file's name}`.

    Raises:
        UserError: no row fits any format; names the columns found and the nearest format.
    """
    votes = Counter(found for row in rows if (found := _format_of(row, columns or {})))
    if votes:
        return votes.most_common(1)[0][0]
    names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
    if not names:
        raise UserError(Problem("no row to tell the format from", "give at least one whole row"))
    found = ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")
    nearest = max(NEEDED, key=lambda name: _likeness(NEEDED[name], names))
    wanted = ", ".join(f"{ours}: {_closest(ours, names)}" for ours in NEEDED[nearest])
    known = "; ".join(f"{name} ({', '.join(needed)})" for name, needed in NEEDED.items())
    raise UserError(
        Problem(
            f"the columns {found} fit no known format; known are {known}",
            f"the nearest is {nearest}: name your columns, `columns: {{{wanted}}}`",
        )
    )


def parse(value: dict[str, Any] | str, format: str, columns: Mapping[str, str] | None = None) -> Example | str:
    """What a row says in `format`, or the reason why it is refused. Never raises, whatever JSON it is."""
    if isinstance(value, str):
        value = {"text": value} if format == "text" else {}
        if not value:
            return "not an object: a document"
    try:
        return _PARSERS[format](_Row(value, format, columns or {}))
    except Refused as refused:
        return str(refused)


class _Row:
    """A row's columns under our names; errors use the file's."""

    def __init__(self, value: dict[str, Any], format: str, columns: Mapping[str, str]) -> None:
        self._value = value
        self._format = format
        self._columns = columns

    def name(self, ours: str) -> str:
        """The file's name of our column; our own where the row has neither it nor an alias."""
        if ours in self._columns:
            return self._columns[ours]
        if ours in self._value:
            return ours
        aliases = ALIASES.get((self._format, ours), ())
        return next((name for name in aliases if name in self._value), ours)

    def get(self, ours: str) -> Any:
        """The value, None where there is none (a missing number counts as none)."""
        value = self._value.get(self.name(ours))
        return None if isinstance(value, float) and math.isnan(value) else value

    def need(self, ours: str) -> Any:
        name = self.name(ours)
        if name not in self._value:
            raise Refused(f"missing column: {name}")
        if isinstance(self._value[name], float) and self.get(ours) is None:
            raise Refused(f"NaN in column {name}")
        return self._value[name]

    def text(self, ours: str) -> str:
        """An optional column's text, "" where there is none."""
        value = self.get(ours)
        return "" if value is None else text_of(value)

    def turns(self, ours: str, role: str) -> list[Message]:
        """The column as messages: a message, a list of them, or text as one turn of `role`."""
        value = self.need(ours)
        messages = parsed(value) if isinstance(value, str) else value if isinstance(value, list) else [value]
        # An answer may itself be JSON: only a list whose every item says its role counts as messages.
        if isinstance(messages, list) and messages and all(map(is_message, messages)):
            return role_messages(messages)
        return role_messages([{"role": role, "content": value}])


def _instruction(row: _Row) -> Conversation:
    question, answer = row.need("instruction"), row.need("output")
    asked = [part for part in ("" if question is None else text_of(question), row.text("input")) if part.strip()]
    if not asked:
        raise Refused("empty instruction")
    turns: list[dict[str, Any]] = [{"role": "system", "content": row.text("system")}]
    history = parsed(row.get("history")) or []
    if not isinstance(history, list):
        raise Refused("history is not a list of [question, answer]")
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Refused("history is not a list of [question, answer]")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    turns += [{"role": "user", "content": "\n\n".join(asked)}, {"role": "assistant", "content": answer}]
    return Conversation(trained(role_messages(turns)))


def _messages(row: _Row) -> Conversation:
    return Conversation(trained(role_messages(parsed(row.need("messages")))), tools_of(row.get("tools")))


def _sharegpt(row: _Row) -> Conversation:
    messages = from_value_messages(parsed(row.need("conversations")))
    if row.text("system").strip():
        messages.insert(0, Message("system", row.text("system")))
    return Conversation(trained(messages), tools_of(row.get("tools")))


def _prompt(row: _Row) -> Conversation:
    messages = row.turns("prompt", "user") + row.turns("completion", "assistant")
    return Conversation(trained(messages), tools_of(row.get("tools")))


def _text(row: _Row) -> Text:
    value = row.need("text")
    text = "" if value is None else text_of(value)
    if not text.strip():
        raise Refused("empty text")
    return Text(text)


def _preference(row: _Row) -> Preference:
    sides = [trained(row.turns(side, "assistant")) for side in ("chosen", "rejected")]
    if row.get("prompt") is None:
        prompt = _shared_turns(*sides)
        if not prompt:
            raise Refused("no prompt: chosen and rejected share no first turns")
    else:
        prompt = tuple(row.turns("prompt", "user"))
    chosen, rejected = (trained(list(side[len(prompt) :])) if side[: len(prompt)] == prompt else side for side in sides)
    if chosen == rejected:
        raise Refused("chosen equals rejected")
    return Preference(prompt, chosen, rejected)


def _shared_turns(one: tuple[Message, ...], other: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns that both begin with; the last turn of each is its answer even where they are equal."""
    shared = 0
    while shared < min(len(one), len(other)) - 1 and one[shared] == other[shared]:
        shared += 1
    return one[:shared]


_PARSERS: dict[str, Callable[[_Row], Example]] = {
    "instruction": _instruction,
    "messages": _messages,
    "sharegpt": _sharegpt,
    "prompt": _prompt,
    "text": _text,
    "preference": _preference,
}


def _format_of(row: dict[str, Any] | str, columns: Mapping[str, str]) -> str | None:
    """The first format whose needed columns are all there, under our names before aliases."""
    if isinstance(row, str):
        return "text"
    names = {*row, *(ours for ours, theirs in columns.items() if theirs in row)}
    by_name = [name for name, needed in NEEDED.items() if names.issuperset(needed)]
    by_alias = [
        name
        for name, needed in NEEDED.items()
        if all({ours, *ALIASES.get((name, ours), ())} & names for ours in needed)
    ]
    found = next(iter(by_name + by_alias), None)
    if found not in ("messages", "sharegpt"):
        return found
    turns = parsed(row.get(_Row(row, found, columns).name(NEEDED[found][0])))
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict) and "role" in first:
        return "messages"
    return "sharegpt" if isinstance(first, dict) and "from" in first else found


def _closest(ours: str, names: Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(ours, names, n=1, cutoff=0.6)), "...")


def _likeness(needed: Sequence[str], names: Sequence[str]) -> float:
    best = [max(difflib.SequenceMatcher(None, ours, name).ratio() for name in names) for ours in needed]
    return sum(best) / len(best)
