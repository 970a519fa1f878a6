"""The data rows behind a run's prompts, with which rewards compare answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.data import formats
from stoker.data.chat_template import as_template_message
from stoker.data.corpus import Corpus, TokenisedSource
from stoker.data.readers import decode
from stoker.data.rows import Conversation, Raw, Rejected
from stoker.data.sequences import Document
from stoker.errors import RunFailed
from stoker.scoring.answer_rows import AnswerRow, expected_of


class PromptRows:
    """Rows of a corpus by file and number.

    Sources are read again, as tokens hold only a row's prompt; rows stay encoded until they are requested.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._rows: dict[int, dict[tuple[str, int], Raw]] = {}

    def __getitem__(self, document: Document) -> AnswerRow:
        sources = (*self._corpus.sources, *self._corpus.evaluation)
        source = sources[document.source]
        if document.source not in self._rows:
            rows = (raw for raw in source.source.rows() if isinstance(raw, Raw))
            self._rows[document.source] = {(raw.source, raw.row): raw for raw in rows}
        file, number = source.cache.origin(document.index)
        raw = self._found(self._rows[document.source], file, number)
        value = decode(raw)
        assert not isinstance(value, Rejected)
        fields = value if isinstance(value, dict) else {"text": value}
        return AnswerRow(raw.source, raw.row, *_asked_and_expected(source, fields), scorers=(), fields=fields)

    @staticmethod
    def _found(rows: dict[tuple[str, int], Raw], file: str, number: int) -> Raw:
        """Finds a row by its file at tokenisation; equal content in another folder matches by file name."""
        exact = rows.get((file, number))
        if exact is not None:
            return exact
        here = [raw for (name, row), raw in rows.items() if row == number and Path(name).name == Path(file).name]
        if len(here) != 1:
            raise RunFailed(f"row {number} of {file} is no longer in the data, or is in several files of the same name")
        return here[0]


def _asked_and_expected(source: TokenisedSource, fields: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], Any]:
    """Returns the prompt's turns and the expected answer: from a column, else the row's last answer.

    If the row's label says that its answer is bad, only the column ``expected`` has another one.
    """
    example = formats.parse(fields, source.format, source.block.columns, prompts=source.prompts)
    turns = example.messages if isinstance(example, Conversation) else ()
    asked = tuple(as_template_message(turn) for turn in turns[:-1])
    if isinstance(example, Conversation) and example.good is False:
        return asked, expected_of({"expected": fields.get("expected")})
    named = expected_of(fields)
    if named is not None or not turns:
        return asked, named
    return asked, turns[-1].content or None
