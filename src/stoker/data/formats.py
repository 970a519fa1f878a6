"""Parses a row's columns into a conversation, a document or a preference, or gives the reason why it cannot.

| format | columns |
| --- | --- |
| instruction | instruction, output; optionally input, system, history ([[question, answer], ...]) |
| messages | messages: [{role, content, ...}]; optionally tools |
| sharegpt | conversations: [{from, value}]; optionally system, tools |
| prompt | prompt, completion: each text or a list of messages |
| text | text |
| preference | chosen, rejected, and prompt: each text, a message or a list of messages; optionally system, tools, and
  margin, or chosen_score and rejected_score |
| ranked | prompt, and answers: a list, best first, or with a list of scores (higher is better) or of ranks (1 is best)
  beside it; each text, a message or a list of messages; optionally system and tools. Every pair that differs counts |
| scored | prompt, answer and score (higher is better): one answer; all rows with a prompt are joined to a ranking, see
  `stoker.data.prompt_groups` |
| question | prompt: text or a list of messages; the model answers it itself, in tasks that reward answers |
| judged | a conversation of any format above, and label: whether its answer is good |

Some other names that published data sets use for these columns are accepted (`Format.aliases`).
Lists may also be JSON in a string, as in CSV.

An input follows its instruction after a blank line. Turns after the assistant's last are cut, since nothing is trained
in them. Empty system messages are left out. Numbers and booleans become text as JSON writes them. Consecutive turns of
one role are kept: the chat template decides whether to accept them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from stoker.data.messages import (
    Refused,
    from_value_messages,
    has_content,
    messages_in,
    parsed,
    role_messages,
    text_of,
    tools_of,
    trained,
)
from stoker.data.rows import Conversation, Example, Message, Preference, Ranking, Text

PAIRS = ("preference", "ranked", "scored")
CONVERSATIONS = ("messages", "sharegpt", "instruction", "prompt")
_VERDICTS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Format:
    """A row format: its columns and its parser.

    Attributes:
        parse: makes an example of a row, or raises `Refused`.
        needed: the columns that identify the format.
        aliases: other names that published data sets use for a column.
    """

    parse: Callable[[_Row], Example]
    needed: tuple[str, ...]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def parse(value: dict[str, Any] | str, format: str, columns: Mapping[str, str] | None = None) -> Example | str:
    """Parses a row in `format` to an example, or to the reason why it is refused. Never raises, whatever the JSON."""
    return read(value, format, columns)[0]


def read(
    value: dict[str, Any] | str, format: str, columns: Mapping[str, str] | None = None
) -> tuple[Example | str, list[str]]:
    """Returns the result of `parse`, and the columns with content that the format does not read."""
    if isinstance(value, str):
        value = {"text": value} if format == "text" else {}
        if not value:
            return "not an object: a document", []
    row = _Row(value, format, columns or {})
    try:
        return FORMATS[format].parse(row), row.ignored()
    except Refused as refused:
        return str(refused), []


def verdict_of(label: Any) -> bool | None:
    """Parses a label as good (True) or bad (False); None if it is neither."""
    if not isinstance(label, bool | int | float | str):
        return None
    return _VERDICTS.get(str(int(label) if label in (0, 1) else label).strip().lower())


def column_of(row: Mapping[str, Any], format: str, columns: Mapping[str, str], ours: str) -> str:
    """Returns the file's name of one of our columns; our name if the row has neither it nor an alias."""
    if ours in columns:
        return columns[ours]
    if ours in row:
        return ours
    return next((name for name in FORMATS[format].aliases.get(ours, ()) if name in row), ours)


def format_of(
    row: dict[str, Any] | str,
    columns: Mapping[str, str],
    *,
    judged: bool = True,
    questions: bool = False,
    pairs: bool = False,
) -> str | None:
    """Returns the first format whose required columns are all present, under our names before aliases.

    Args:
        judged: whether a conversation with a label is the format ``judged``.
        questions: whether a prompt alone makes a row.
        pairs: whether answers are compared; only then is a conversation with a score the format ``scored``.
    """
    if isinstance(row, str):
        return "text"
    names = {*row, *(ours for ours, theirs in columns.items() if theirs in row)}
    formats = {name: format.needed for name, format in FORMATS.items() if name not in ("judged", "question")}
    if not pairs:
        del formats["scored"]
    by_name = [name for name, needed in formats.items() if names.issuperset(needed)]
    by_alias = [
        name
        for name, needed in formats.items()
        if all({ours, *FORMATS[name].aliases.get(ours, ())} & names for ours in needed)
    ]
    question = ["question"] if questions and names & {"prompt", *FORMATS["question"].aliases["prompt"]} else []
    found = next(iter(by_name + by_alias + question), None)
    if "scored" in by_alias and found in CONVERSATIONS:
        return "scored"
    if judged and found in CONVERSATIONS and verdict_of(row.get(columns.get("label", "label"))) is not None:
        return "judged"
    if found not in ("messages", "sharegpt"):
        return found
    turns = parsed(row.get(column_of(row, found, columns, FORMATS[found].needed[0])))
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict) and "role" in first:
        return "messages"
    return "sharegpt" if isinstance(first, dict) and "from" in first else found


class _Row:
    """A row's columns under our names; errors use the file's."""

    def __init__(self, value: dict[str, Any], format: str, columns: Mapping[str, str]) -> None:
        self._value = value
        self._format = format
        self._columns = columns
        self._read: set[str] = set()

    def ignored(self) -> list[str]:
        """Returns the columns with content that have not been read."""
        return [name for name, value in self._value.items() if name not in self._read and has_content(value)]

    def use_all(self) -> None:
        """Marks every column as read, since rewards receive all of them."""
        self._read.update(self._value)

    def as_conversation(self) -> Conversation:
        """Returns the row in the format of a conversation that it fits.

        Raises:
            Refused: it fits none.
        """
        found = format_of(self._value, self._columns, judged=False)
        if found not in CONVERSATIONS:
            raise Refused("no conversation beside the label")
        self._format = found
        conversation = FORMATS[found].parse(self)
        assert isinstance(conversation, Conversation)
        return conversation

    def name(self, ours: str) -> str:
        """Returns the file's name of our column, which counts as read."""
        name = column_of(self._value, self._format, self._columns, ours)
        self._read.add(name)
        return name

    def get(self, ours: str) -> Any:
        """Returns the value; None if it is missing (a missing number counts as such)."""
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
        """Returns an optional column's text, "" if it is missing."""
        value = self.get(ours)
        return "" if value is None else text_of(value)

    def turns(self, ours: str, role: str) -> list[Message]:
        """Parses the column to messages: one message, a list of them, or text as one turn of `role`."""
        return self.turns_in(self.need(ours), ours, role)

    def turns_in(self, value: Any, ours: str, role: str) -> list[Message]:
        """Returns a value of a column as messages; see `turns`."""
        name, turns = self.name(ours), parsed(value)
        # An answer may itself be JSON: in text, only a list whose every item has a role counts as messages.
        found = None if isinstance(value, str) and not isinstance(turns, list) else messages_in(turns, f"{name}[]")
        return role_messages([{"role": role, "content": value}], name) if found is None else found

    def system(self) -> list[Message]:
        """Returns the system column as a message, unless it is empty."""
        text = self.text("system")
        return [Message("system", text, place=self.name("system"))] if text.strip() else []


def _instruction(row: _Row) -> Conversation:
    turns = row.system()
    history = parsed(row.get("history")) or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise Refused("history is not a list of [question, answer]")
    for question, said in history:
        turns += role_messages(
            [{"role": "user", "content": question}, {"role": "assistant", "content": said}], "history"
        )
    question, answer = _asked(row, "instruction"), row.need("output")
    turns += [*question, *role_messages([{"role": "assistant", "content": answer}], row.name("output"))]
    return Conversation(trained(turns))


def _asked(row: _Row, ours: str) -> list[Message]:
    """Returns a question and its input as one turn."""
    question = row.need(ours)
    asked = [part for part in ("" if question is None else text_of(question), row.text("input")) if part.strip()]
    if not asked:
        raise Refused(f"empty {ours}")
    return role_messages([{"role": "user", "content": "\n\n".join(asked)}], row.name(ours))


def _messages(row: _Row) -> Conversation:
    turns = role_messages(parsed(row.need("messages")), f"{row.name('messages')}[]")
    return Conversation(trained(turns), tools_of(row.get("tools")))


def _sharegpt(row: _Row) -> Conversation:
    turns = from_value_messages(parsed(row.need("conversations")), f"{row.name('conversations')}[]")
    return Conversation(trained(row.system() + turns), tools_of(row.get("tools")))


def _prompt(row: _Row) -> Conversation:
    messages = row.turns("prompt", "user") + row.turns("completion", "assistant")
    return Conversation(trained(messages), tools_of(row.get("tools")))


def _question(row: _Row) -> Conversation:
    """Converts a prompt without an answer to a conversation with an empty answer."""
    turns = [*row.system(), *row.turns("prompt", "user")]
    if turns[-1].role != "assistant":
        turns.append(Message("assistant", ""))
    row.use_all()
    return Conversation(trained(turns), tools_of(row.get("tools")))


def _text(row: _Row) -> Text:
    value = row.need("text")
    text = "" if value is None else text_of(value)
    if not text.strip():
        raise Refused("empty text")
    return Text(text)


def _preference(row: _Row) -> Preference:
    sides = [trained(row.turns(side, "assistant")) for side in ("chosen", "rejected")]
    prompt = tuple(_prompt_of(row, *sides))
    chosen, rejected = (trained(list(side[len(prompt) :])) if side[: len(prompt)] == prompt else side for side in sides)
    if chosen == rejected:
        raise Refused("chosen equals rejected")
    if prompt[0].role != "system":
        prompt = (*row.system(), *prompt)
    return Preference(prompt, chosen, rejected, tools_of(row.get("tools")), _margin(row))


def _ranked(row: _Row) -> Ranking:
    given = parsed(row.need("answers"))
    if not isinstance(given, list) or len(given) < 2:
        raise Refused(f"{row.name('answers')} is not a list of two answers or more")
    answers = tuple(trained(row.turns_in(answer, "answers", "assistant")) for answer in given)
    prompt = row.turns("prompt", "user")
    if prompt[0].role != "system":
        prompt = [*row.system(), *prompt]
    worth = _worth(row, len(answers))
    scored = row.get("scores") is not None
    pairs = tuple(
        (better, worse, worth[better] - worth[worse] if scored else 0.0)
        for better, worse in permutations(range(len(answers)), 2)
        if worth[better] > worth[worse] and answers[better] != answers[worse]
    )
    if not pairs:
        raise Refused("no two answers differ in rank")
    return Ranking(tuple(prompt), answers, pairs, tools_of(row.get("tools")))


def _scored(row: _Row) -> Ranking:
    """Parses the row that `stoker.data.prompt_groups` joins the answers to a prompt to."""
    answers, scores = row.get("answers") or [], row.get("scores") or []
    if len(answers) < 2:
        raise Refused("a prompt with one scored answer, which is compared with none")
    if len(set(scores)) == 1:
        raise Refused("all answers to the prompt have the same score")
    return _ranked(row)


def _worth(row: _Row, answers: int) -> list[float]:
    """Returns the value of each answer: its score, or its negated rank; by default answers are in order, best first."""
    name = next((name for name in ("scores", "ranks") if row.get(name) is not None), None)
    if name is None:
        return [float(-number) for number in range(answers)]
    values = parsed(row.get(name))
    if not isinstance(values, list) or len(values) != answers:
        raise Refused(f"{row.name(name)} has not one number for each answer")
    numbers = [_as_number(value, row.name(name)) for value in values]
    return numbers if name == "scores" else [-number for number in numbers]


def _margin(row: _Row) -> float:
    """Returns the margin of the chosen answer: the column ``margin``, or the difference of the two scores."""
    if row.get("margin") is not None:
        return _number(row, "margin")
    if row.get("chosen_score") is None or row.get("rejected_score") is None:
        return 0.0
    return _number(row, "chosen_score") - _number(row, "rejected_score")


def _number(row: _Row, ours: str) -> float:
    return _as_number(row.get(ours), row.name(ours))


def _as_number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise Refused(f"{name} is not a number")
    return number


def _prompt_of(row: _Row, chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> Sequence[Message]:
    """Returns the turns before the answers: those of the prompt's column, or the common first turns of both sides."""
    if row.get("prompt") is not None:
        if isinstance(row.get("prompt"), str) and row.text("input").strip():
            return _asked(row, "prompt")
        return row.turns("prompt", "user")
    shared = _shared_turns(chosen, rejected)
    if not shared and row.get("conversations") is not None:
        return row.turns("conversations", "user")
    if not shared:
        raise Refused("no prompt: chosen and rejected share no first turns")
    return shared


def _shared_turns(one: tuple[Message, ...], other: tuple[Message, ...]) -> tuple[Message, ...]:
    """Returns the common first turns of both; the last turn of each is its answer, even if they are equal."""
    shared = 0
    while shared < min(len(one), len(other)) - 1 and one[shared] == other[shared]:
        shared += 1
    return one[:shared]


def _judged(row: _Row) -> Conversation:
    good = verdict_of(row.need("label"))
    if good is None:
        raise Refused(f"{row.name('label')} is neither true nor false")
    return replace(row.as_conversation(), good=good)


# In order of precedence, for rows that fit several.
FORMATS: dict[str, Format] = {
    "preference": Format(
        _preference,
        ("chosen", "rejected"),
        {
            "chosen": ("chosen_messages",),
            "rejected": ("rejected_messages",),
            "prompt": ("instruction", "question", "query"),
            "chosen_score": ("score_chosen",),
            "rejected_score": ("score_rejected",),
            "conversations": ("messages", "conversation"),
        },
    ),
    "ranked": Format(
        _ranked,
        ("prompt", "answers"),
        {
            "prompt": ("instruction", "question", "query"),
            "answers": ("responses", "completions", "candidates"),
            "scores": ("ratings", "rewards"),
            "ranks": ("rank", "ranking"),
        },
    ),
    "scored": Format(
        _scored,
        ("prompt", "answer", "score"),
        {
            "prompt": ("instruction", "question", "query"),
            "answer": ("response", "completion", "output"),
            "score": ("rating", "reward"),
        },
    ),
    "messages": Format(_messages, ("messages",), {"messages": ("conversations", "conversation")}),
    "sharegpt": Format(_sharegpt, ("conversations",), {"conversations": ("conversation", "messages")}),
    "instruction": Format(
        _instruction,
        ("instruction", "output"),
        {"instruction": ("question", "query", "prompt"), "input": ("context",), "output": ("response", "answer")},
    ),
    "prompt": Format(_prompt, ("prompt", "completion")),
    "question": Format(_question, ("prompt",), {"prompt": ("question", "query", "problem")}),
    "text": Format(_text, ("text",), {"text": ("content", "document")}),
    "judged": Format(_judged, ("messages", "label")),
}
