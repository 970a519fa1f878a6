"""Reading of the user's rows of prompt and expected answer.

A row is an object or a record with a prompt (text, or messages) and optionally an expected answer (text, a number,
several correct ones, or a JSON schema). Rows of messages whose last turn is the assistant's expect that turn.
``scorer`` names the scorers of a row. The other columns are variables of prompt templates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.data.files.readers import decode
from stoker.data.files.rows import Message, Rejected
from stoker.data.formats.expected_answer import as_text, split_answer
from stoker.data.formats.messages import Refused, has_content, messages_in, parse_turns, parsed, text_of
from stoker.data.sources import open_source
from stoker.data.templates.chat_template import as_template_message
from stoker.errors import Problem, UserError
from stoker.job.blocks.source_block import SourceBlock

PROMPT = ("prompt", "messages", "conversations", "question", "instruction", "query", "input")
SCORER = "scorer"
MOST_PROBLEMS = 10  # listed per file


@dataclass(frozen=True)
class AnswerRow:
    """A prompt and what is expected of its answer.

    Attributes:
        source, row: its file, and its row number there.
        turns: the conversation up to the prompt; empty if the row has no prompt column.
        expected: the row's value for the expected answer, unchanged; None if the row has none.
        scorers: names of the row's own scorers.
        fields: all columns.
    """

    source: str
    row: int
    turns: tuple[dict[str, Any], ...]
    expected: Any
    scorers: tuple[str, ...]
    fields: Mapping[str, Any]

    @property
    def accepted(self) -> tuple[str, ...]:
        """The correct texts."""
        if self.expected is None:
            return ()
        values = self.expected if isinstance(self.expected, list) else [self.expected]
        return tuple(as_text(value) for value in values)

    def problem(self, message: str, suggestion: str = "") -> Problem:
        """Returns a problem at the row's place."""
        return Problem(message, suggestion, file=self.source, line=self.row)

    def placed(self, problem: Problem) -> Problem:
        """Returns a problem of the row's content, at the row's place; for `stoker.errors.placed_errors`."""
        return self.problem(problem.message, problem.suggestion)


@dataclass(frozen=True)
class AnswerRows:
    """The rows of a file, with a fingerprint of its content."""

    path: str
    fingerprint: str
    rows: tuple[AnswerRow, ...]


def read_answer_rows(path: str, base: Path, *, limit: int | None = None) -> AnswerRows:
    """Reads the rows of a file, folder, glob or hub data set.

    Args:
        limit: most rows to read.

    Raises:
        UserError: it cannot be read, has no rows, or has unusable rows, each with its place.
    """
    source = open_source(SourceBlock(path=path), base)
    rows, problems = [], []
    for raw in itertools.islice(source.rows(), limit):
        value = raw if isinstance(raw, Rejected) else decode(raw)
        if isinstance(value, Rejected):
            problems.append(Problem(value.reason, file=value.source, line=value.row))
        elif isinstance(value, str):
            problems.append(Problem("a text file has no prompts and answers", "write JSON Lines", file=raw.source))
        else:
            try:
                rows.append(_row(raw.source, raw.row, value))
            except Refused as refused:
                problems.append(Problem(str(refused), file=raw.source, line=raw.row))
        if len(problems) == MOST_PROBLEMS:
            break
    if problems:
        raise UserError(*problems)
    if not rows:
        raise UserError(f"{path} has no rows")
    return AnswerRows(path, source.fingerprint(), tuple(rows))


def _row(source: str, number: int, fields: dict[str, Any]) -> AnswerRow:
    turns, expected = split_answer(_turns(fields), fields)
    return AnswerRow(
        source,
        number,
        tuple(as_template_message(turn) for turn in turns),
        expected,
        tuple(_scorers(fields.get(SCORER))),
        fields,
    )


def _turns(fields: Mapping[str, Any]) -> list[Message]:
    name = next((name for name in PROMPT if has_content(fields.get(name))), None)
    if name is None:
        return []
    value = fields[name]
    turns = parsed(value) if name in ("messages", "conversations") or isinstance(value, list) else value
    if not isinstance(turns, str):
        found = messages_in(turns, name)
        if found is not None:
            return found
        if isinstance(turns, list | dict):
            raise Refused(f"{name} is neither text nor messages of role and content")
    text = text_of(turns)
    if name == "instruction" and has_content(fields.get("input")):  # Alpaca's rows
        text = f"{text}\n\n{text_of(fields['input'])}"
    system = fields.get("system")
    before = [{"role": "system", "content": text_of(system)}] if has_content(system) else []
    return parse_turns([*before, {"role": "user", "content": text}], name)


def _scorers(value: Any) -> Iterator[str]:
    if not has_content(value):
        return
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str):
            raise Refused(f"{SCORER} is not the name of a scorer: {as_text(name)[:40]}")
        yield name
