"""The data rows behind a run's prompts, with which rewards compare answers."""

from __future__ import annotations

from stoker.data.corpus import Corpus
from stoker.data.sequences import Document
from stoker.data.templates.chat_template import as_template_message
from stoker.scoring.answer_rows import AnswerRow


def prompt_row(corpus: Corpus, document: Document) -> AnswerRow:
    """Returns the row of a prompt: its turns as templates receive them, its expected answer and its columns."""
    source = (*corpus.sources, *corpus.evaluation)[document.source]
    raw, fields = source.row_of(document.index)
    asked, expected = source.prompt_and_expected(fields)
    return AnswerRow(raw.source, raw.row, tuple(map(as_template_message, asked)), expected, scorers=(), fields=fields)
