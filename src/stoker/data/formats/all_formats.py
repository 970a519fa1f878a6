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
| hh_rlhf | chosen, rejected: each a conversation in one text, see `stoker.data.formats.human_assistant_text` |
| ranked | prompt, and answers: a list, best first, or with a list of scores (higher is better) or of ranks (1 is best)
  beside it; each text, a message or a list of messages; optionally system and tools. Every pair that differs counts |
| scored | prompt, answer and score (higher is better): one answer; all rows with a prompt are joined to a ranking, see
  `stoker.data.formats.prompt_groups` |
| question | prompt: text or a list of messages; the model answers it itself, in tasks that reward answers |
| judged | a conversation of any format above, and label: whether its answer is good |

Answers of pairs and a completion may hold the whole conversation: see `stoker.data.formats.shared_prompt`.
Some other names that published data sets use for these columns are accepted (`Format.aliases`).
Lists may also be JSON in a string, as in CSV.

An input follows its instruction after a blank line. Turns after the assistant's last are cut, since nothing is trained
in them; where the model answers the rows itself, they belong to the prompt. Empty system messages are left out. Numbers
and booleans become text as JSON writes them. Consecutive turns of one role are kept: the chat template decides whether
to accept them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from stoker.data.files.rows import Conversation, Example
from stoker.data.formats.conversation_formats import CONVERSATIONS, QUESTION, TEXT
from stoker.data.formats.format_spec import Format
from stoker.data.formats.human_assistant_text import is_human_assistant_text
from stoker.data.formats.messages import Refused, parsed
from stoker.data.formats.named_columns import NamedColumns, column_of
from stoker.data.formats.pair_formats import PAIRS

RowUse = Literal["answers", "pairs", "judged", "prompts", "texts"]
"""The use of rows whose format is detected: as a task trains on them (`stoker.job.task_spec.Rows`); as prompts that the
model answers itself, beside which pairs of answers are not read; or as texts, be they prompts without answers."""

_VERDICTS = {"true": True, "1": True, "false": False, "0": False}


def parse(
    value: dict[str, Any] | str, format: str, columns: Mapping[str, str] | None = None, *, prompts: bool = False
) -> Example | str:
    """Parses a row in `format` to an example, or to the reason why it is refused. Never raises, whatever the JSON.

    Args:
        prompts: whether the model answers the row itself: the prompt is all turns before an assistant's turn at the
            row's end, which may be missing or empty.
    """
    return read(value, format, columns, prompts=prompts)[0]


def read(
    value: dict[str, Any] | str, format: str, columns: Mapping[str, str] | None = None, *, prompts: bool = False
) -> tuple[Example | str, list[str]]:
    """Returns the result of `parse`, and the columns with content that the format does not read."""
    if isinstance(value, str):
        if format != "text":
            return "not an object: a document", []
        value = {"text": value}
    row = NamedColumns(value, FORMATS[format].aliases, columns or {}, prompts=prompts)
    try:
        return FORMATS[format].parse(row), row.ignored()
    except Refused as refused:
        return str(refused), []


def taken_columns(
    rows: Iterable[dict[str, Any] | str],
    format: str,
    columns: Mapping[str, str] | None = None,
    *,
    prompts: bool = False,
) -> dict[str, str]:
    """Returns the columns that a format reads in some rows, ``{our name: the file's name}``; those it needs first."""
    found: dict[str, str] = {}
    for value in rows:
        if isinstance(value, dict):
            row = NamedColumns(value, FORMATS[format].aliases, columns or {}, prompts=prompts)
            with suppress(Refused):
                FORMATS[format].parse(row)
            found |= row.taken()
    return {ours: found[ours] for ours in sorted(found, key=lambda ours: ours not in FORMATS[format].needed)}


def verdict_of(label: Any) -> bool | None:
    """Parses a label as good (True) or bad (False); None if it is neither."""
    if not isinstance(label, bool | int | float | str):
        return None
    return _VERDICTS.get(str(int(label) if label in (0, 1) else label).strip().lower())


def format_of(row: dict[str, Any] | str, columns: Mapping[str, str], use: RowUse = "answers") -> str | None:
    """Returns the first format whose required columns are all present, under our names before aliases."""
    found = _format_without_label(row, columns, use)
    if found in CONVERSATIONS and isinstance(row, dict):
        label = row.get(columns.get("label", "label"))
        return found if verdict_of(label) is None else "judged"
    return found


def _format_without_label(row: dict[str, Any] | str, columns: Mapping[str, str], use: RowUse) -> str | None:
    if isinstance(row, str):
        return "text"
    names = {*row, *(ours for ours, theirs in columns.items() if theirs in row)}
    has_prompt = not names.isdisjoint(("prompt", *QUESTION.aliases["prompt"])) and use in ("prompts", "texts")
    left_out = {"judged", "question"}
    if use == "prompts" and has_prompt:
        left_out.update(PAIRS)
    elif use != "pairs":
        left_out.add("scored")
    formats = {name: format for name, format in FORMATS.items() if name not in left_out}
    by_name = [name for name, format in formats.items() if names.issuperset(format.needed)]
    by_alias = [
        name
        for name, format in formats.items()
        if all({ours, *format.aliases.get(ours, ())} & names for ours in format.needed)
    ]
    found = next(iter(by_name + by_alias + ["question"] * has_prompt), None)
    if "scored" in by_alias and found in CONVERSATIONS:
        return "scored"
    if found == "preference":
        sides = (row.get(column_of(row, {}, columns, side)) for side in FORMATS["hh_rlhf"].needed)
        return "hh_rlhf" if all(map(is_human_assistant_text, sides)) else found
    if found not in ("messages", "sharegpt"):
        return found
    turns = parsed(row.get(column_of(row, FORMATS[found].aliases, columns, FORMATS[found].needed[0])))
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict) and "role" in first:
        return "messages"
    return "sharegpt" if isinstance(first, dict) and "from" in first else found


def _judged(row: NamedColumns) -> Conversation:
    good = verdict_of(row.need("label"))
    if good is None:
        raise Refused(f"{row.name('label')} is neither true nor false")
    found = _format_without_label(row.value, row.columns, "answers")
    if found not in CONVERSATIONS:
        raise Refused("no conversation beside the label")
    row.read_as(FORMATS[found].aliases)
    conversation = FORMATS[found].parse(row)
    assert isinstance(conversation, Conversation)
    return replace(conversation, good=good)


# In order of precedence, for rows that fit several.
FORMATS: dict[str, Format] = {
    **PAIRS,
    **CONVERSATIONS,
    "question": QUESTION,
    "text": TEXT,
    "judged": Format(_judged, ("messages", "label")),
}
