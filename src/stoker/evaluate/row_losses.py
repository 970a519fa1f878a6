"""Loss of each row of data under a run."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from stoker.checkpoint.load_run import TunedRun
from stoker.data.build_cache import Report
from stoker.data.sequences import Document
from stoker.data.tokenizers.token_bytes import byte_lengths
from stoker.errors import Problem, UserError
from stoker.evaluate.measure_run import corpus_of, source_like, tokenised_like
from stoker.evaluate.token_losses import measuring
from stoker.train.evaluate import evaluate
from stoker.train.language.measured_task import measured_training


@dataclass(frozen=True)
class PlacedRow:
    """A tokenised row, with its file and its row number there."""

    document: Document
    source: str
    row: int


@dataclass(frozen=True)
class RowLoss:
    """The loss of a row.

    Attributes:
        source, row: its file, and its row number there.
        part: number of the piece of a split row.
        loss: sum over its targets, nats.
        text_bytes: bytes of text that the targets encode; 0 if the tokenizer does not define them.
    """

    source: str
    row: int
    part: int
    loss: float
    targets: int
    text_bytes: int

    @property
    def place(self) -> tuple[str, int, int]:
        return self.source, self.row, self.part


def rows_of(tuned: TunedRun, data: str | None, form: str, base: Path, report: Report | None = None) -> list[PlacedRow]:
    """Returns the rows of a source, or those that the run held out, in the run's own tokenizer and template.

    Raises:
        UserError: the run held nothing out, or every row of the source is dropped.
    """
    if data is None:
        with closing(corpus_of(tuned, base, report)) as corpus:
            if documents := corpus.evaluation_documents():
                return [PlacedRow(document, *corpus.sequences.origin(document)) for document in documents]
        raise UserError(f"{tuned.folder.path} held no rows out: name data to evaluate on")
    cache = tokenised_like(tuned, source_like(tuned, data, form), base, report).cache
    return [PlacedRow(Document(cache[row], 0, row), *cache.origin(row)) for row in range(cache.rows)]


def row_losses(tuned: TunedRun, rows: list[PlacedRow]) -> list[RowLoss]:
    """Returns the loss of each row.

    Raises:
        UserError: the run's task has no loss per row.
    """
    if measured_training(tuned.job).target != "token":
        message = f"the loss of {tuned.folder.path} is not one of single rows"
        raise UserError(Problem(message, "compare what they answer: --answers FILE"))
    lengths = byte_lengths(json.loads(tuned.text.codec.definition))
    found: list[RowLoss] = []
    parts: dict[tuple[str, int], int] = {}
    with measuring(tuned) as (task, engine):
        for placed in rows:
            one = evaluate(task, engine, task.lay_out([placed.document]))
            if one is None:
                continue
            row = placed.document.row
            size = 0 if lengths is None else int(lengths[row.ids[1:][row.trained[1:]]].sum())
            place = placed.source, placed.row
            parts[place] = parts.get(place, 0) + 1
            found.append(RowLoss(*place, parts[place], one.loss * one.targets, one.targets, size))
    return found


def paired(first: list[RowLoss], second: list[RowLoss]) -> tuple[list[RowLoss], list[RowLoss], int]:
    """Returns the rows that both have, in one order, and the number of rows that only one of them has."""
    ours, theirs = ({row.place: row for row in rows} for rows in (first, second))
    places = [place for place in ours if place in theirs]
    alone = len(ours.keys() ^ theirs.keys())
    return [ours[place] for place in places], [theirs[place] for place in places], alone


def units_of(first: list[RowLoss], second: list[RowLoss]) -> tuple[str, list[float]]:
    """Returns the unit that both losses can be divided by: targets where these are equal, else bytes of text.

    Raises:
        UserError: the tokens differ, and a tokenizer does not define the text of a token.
    """
    if all(a.targets == b.targets for a, b in zip(first, second, strict=True)):
        return "target", [float(row.targets) for row in first]
    if all(a.text_bytes == b.text_bytes > 0 for a, b in zip(first, second, strict=True)):
        return "byte", [float(row.text_bytes) for row in first]
    message = "the two runs write the rows as different tokens of different text, so their losses cannot be compared"
    raise UserError(Problem(message, "compare what they answer: --answers FILE"))
