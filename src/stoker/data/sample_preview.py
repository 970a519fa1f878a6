"""Previews of training sequences, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.data.corpus import Corpus, TokenisedSource
from stoker.data.files.rows import Raw, Rejected, names_file
from stoker.data.formats.expected_answer import as_text
from stoker.data.formats.pair_formats import PAIRS
from stoker.data.formats.prompt_groups import SCORED, group_by_prompt
from stoker.data.text_codec import TextCodec


@dataclass(frozen=True)
class SamplePreview:
    """One training sequence, token by token.

    Attributes:
        special: whether each token is one of the tokenizer's special tokens.
        expected: of a prompt that the model answers itself, the answer that rewards compare with; None without.
        verdict: ``chosen`` or ``rejected`` of a pair, ``good`` or ``bad`` by a label; empty for others.
        lost: tokens of its row that were truncated after the last one.
        continues: whether its row continues in the next sequence.
    """

    source: str
    row: int
    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    special: tuple[bool, ...]
    expected: str | None = None
    verdict: str = ""
    lost: int = 0
    continues: bool = False


@dataclass(frozen=True)
class SequencePreview:
    """One sequence of a run, with the documents packed into it.

    Attributes:
        number: its number in training order, from 0.
        capacity: the maximum of its tokens; None if the run does not pack.
    """

    number: int
    capacity: int | None
    documents: tuple[SamplePreview, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens of all its documents."""
        return sum(len(document.ids) for document in self.documents)


def some_samples(corpus: Corpus, codec: TextCodec, count: int) -> list[SamplePreview]:
    """Sequences spread evenly over the sources."""
    found: list[SamplePreview] = []
    for i, source in enumerate(corpus.sources):
        share = (count + i) // len(corpus.sources)
        ready, size = source.cache.ready // corpus.unit_size, corpus.unit_size
        units = np.unique(np.linspace(0, ready - 1, share).astype(int)) if ready and share else ()
        found += [_sample(source, int(unit) * size + k, codec) for unit in units for k in range(size)]
    return found


def samples_from(sources: Sequence[TokenisedSource], codec: TextCodec, begin: int, count: int) -> list[SamplePreview]:
    """Returns the sequences from a number on, in the order of the sources and of their rows; fewer at the end.

    Args:
        begin: of the first sequence, counted from 0; each of a pair is one.
    """
    found: list[SamplePreview] = []
    for source in sources:
        ready = source.cache.ready
        found += [_sample(source, index, codec) for index in range(begin, min(ready, begin + count - len(found)))]
        begin = max(0, begin - ready)
    return found


def sequences_from(
    corpus: Corpus, codec: TextCodec, begin: int, count: int
) -> tuple[list[SequencePreview], int | None]:
    """Returns ``count`` sequences from ``begin`` on, packed as in the run, and the number in an epoch (None: endless).

    Sequences of later epochs hold the same rows in another order and are not shown.
    """
    sequences = corpus.sequences
    total = None if sequences.epoch_rows is None else sequences.total(1.0)
    most = total if sequences.mixture.pattern else 0  # a stream without rows has no sequences
    end = begin + count if most is None else min(most, begin + count)
    found = []
    for number in range(begin, end):
        documents = tuple(_sample(corpus.sources[d.source], d.index, codec) for d in sequences[number])
        found.append(SequencePreview(number, sequences.capacity, documents))
    return found, total


def _sample(source: TokenisedSource, index: int, codec: TextCodec) -> SamplePreview:
    row, (file, number) = source.cache[index], source.cache.origin(index)
    ids, trained = tuple(row.ids.tolist()), (False, *row.trained[1:].tolist())
    lost, continues = source.cache.ending(index)
    expected, verdict = None, ""
    if source.prompts:
        ids, lost = tuple(row.prompt.tolist()), 0
        trained = (False,) * len(ids)
        _, answer = source.prompt_and_expected(source.row_of(index)[1])
        expected = None if answer is None else as_text(answer)
    if source.format in PAIRS:
        verdict = "rejected" if index % 2 else "chosen"
    elif source.format == "judged" and not source.prompts:
        verdict = "good" if row.good else "bad"
    special_ids = {number for number, token in codec.tokenizer.get_added_tokens_decoder().items() if token.special}
    special = tuple(each in special_ids for each in ids)
    return SamplePreview(
        source=file,
        row=number,
        tokens=token_texts(codec, ids),
        ids=ids,
        trained=trained,
        special=special,
        expected=expected,
        verdict=verdict,
        lost=lost,
        continues=continues,
    )


def samples_of(corpus: Corpus, codec: TextCodec, file: str, row: int) -> tuple[list[SamplePreview], list[Rejected]]:
    """Returns the sequences of one row, and the reasons if it was dropped.

    Args:
        file: the name of a source in the job, or of a file, with or without its folders.
        row: the row's number, as the reader counts.
    """
    found: list[SamplePreview] = []
    dropped: list[Rejected] = []
    for source in (*corpus.sources, *corpus.evaluation):
        cache, any_file = source.cache, file in (source.source.name, source.block.path)
        places = np.flatnonzero(cache.column("row") == row).tolist()
        found += [_sample(source, i, codec) for i in places if any_file or names_file(file, cache.origin(i)[0])]
        if source.format == SCORED:
            for first in _first_joined(source, row):
                if any_file or names_file(file, first[0]):
                    rows = np.flatnonzero(cache.column("row") == first[1]).tolist()
                    found += [_sample(source, i, codec) for i in rows if cache.origin(i) == first]
        for summary in cache.summaries:
            dropped += [d for d in summary.dropped if d.row == row and (any_file or names_file(file, d.source))]
    return found, dropped


def _first_joined(source: TokenisedSource, row: int) -> list[tuple[str, int]]:
    """Returns the file and row of the first answer to each prompt that a later answer in this row is joined to."""
    joined = (raw for raw in group_by_prompt(source.source.rows(), source.block.columns) if isinstance(raw, Raw))
    return [(raw.source, raw.row) for raw in joined if row in raw.others]


def token_texts(codec: TextCodec, ids: Sequence[int]) -> tuple[str, ...]:
    """Returns the text of each token; their concatenation is the whole text. A character belongs to its last token."""
    decode = codec.tokenizer.decode
    texts, start, before = [], 0, ""
    for end in range(1, len(ids) + 1):
        text = decode(list(ids[start:end]), skip_special_tokens=False)
        if text.endswith("\ufffd") and end < len(ids) and end - start < 8:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        # The next piece is decoded with this token before it: some tokenizers drop a text's first space.
        start, before = end - 1, decode([ids[end - 1]], skip_special_tokens=False)
    return tuple(texts)
