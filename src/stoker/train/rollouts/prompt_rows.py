"""The data rows behind a run's prompts, with which rewards compare answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.data import formats
from stoker.data.chat_template import as_template_message
from stoker.data.corpus import Corpus, TokenisedSource
from stoker.data.expected_answer import prompt_and_expected
from stoker.data.readers import decode
from stoker.data.rows import Raw, Rejected
from stoker.data.sequences import Document
from stoker.errors import RunFailed
from stoker.scoring.answer_rows import AnswerRow


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
    """Returns the prompt's turns as templates receive them, and the expected answer."""
    example = formats.parse(fields, source.format, source.block.columns, prompts=source.prompts)
    asked, expected = prompt_and_expected(example, fields)
    return tuple(map(as_template_message, asked)), expected
