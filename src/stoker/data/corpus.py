"""The job's data, ready to train on: sources -> token caches -> mixture -> sequences, and the held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stoker.data.build import Report, find_format, open_cache, open_stream
from stoker.data.cache import TokenCache
from stoker.data.mix import pattern_counts, proportional, temperature_shares, weighted
from stoker.data.sequences import Document, Selection, Sequences, Stream, hold_out
from stoker.data.sources import Source, open_source
from stoker.data.tokenise import RowSettings, TextCodec
from stoker.errors import UserError
from stoker.job.schema import Job, SourceBlock

STREAM_ABOVE = 2 << 30  # bytes of a source from which `stream: auto` streams
STREAM_PATTERN = 1024  # draws over which the weights of streamed sources hold


@dataclass(frozen=True)
class TokenisedSource:
    """One source with its tokens."""

    block: SourceBlock
    source: Source
    format: str
    cache: TokenCache
    streams: bool


@dataclass(frozen=True)
class Corpus:
    """What a run trains on and is evaluated on.

    Attributes:
        sources: the training sources.
        held_out: of each training source, the mask of rows that are held out; empty masks where none are.
        evaluation: the sources of ``evaluate.data``.
        sequences: the training sequences in order.
    """

    sources: tuple[TokenisedSource, ...]
    held_out: tuple[np.ndarray, ...]
    evaluation: tuple[TokenisedSource, ...]
    sequences: Sequences

    def evaluation_documents(self) -> list[Document]:
        """Every held-out row once, in a fixed order; longest last, so that micro-batches are even."""
        documents = [
            Document(source.cache[int(row)], i, int(row))
            for i, (source, mask) in enumerate(zip(self.sources, self.held_out, strict=True))
            for row in np.flatnonzero(mask)
        ]
        documents += [
            Document(source.cache[row], len(self.sources) + i, row)
            for i, source in enumerate(self.evaluation)
            for row in range(source.cache.rows)
        ]
        return sorted(documents, key=lambda d: len(d.row.ids))

    def close(self) -> None:
        """Ends the builds that still run behind."""
        for source in self.sources:
            source.cache.close()


def open_corpus(
    job: Job, codec: TextCodec, *, seq_len: int, base: Path | None = None, report: Report | None = None
) -> Corpus:
    """Opens, and where needed tokenises, the data of a resolved language job.

    Raises:
        UserError: a source cannot be read, its columns fit no format, or nothing of it can be trained on.
    """
    base = base or Path.cwd()
    sources = tuple(tokenise_source(b, job, codec, seq_len, base, report, may_stream=True) for b in job.data)
    evaluation = tuple(
        tokenise_source(b, job, codec, seq_len, base, report, may_stream=False) for b in job.evaluate.data
    )
    fraction = job.evaluate.fraction
    assert fraction != "auto", "the job is resolved before its data is opened"
    held_out = []
    for source in sources:
        digests = source.cache.column("digest")
        # A stream is not held out from: what comes later cannot be compared with what has been trained on.
        held_out.append(np.zeros(len(digests), bool) if source.streams else hold_out(digests, fraction))
    capacity = seq_len if job.train.pack else None
    return Corpus(sources, tuple(held_out), evaluation, _sequences(job, sources, held_out, capacity))


def tokenise_source(
    block: SourceBlock,
    job: Job,
    codec: TextCodec,
    seq_len: int,
    base: Path,
    report: Report | None,
    *,
    may_stream: bool,
) -> TokenisedSource:
    """One source as tokens."""
    source = open_source(block, base)
    found = find_format(source, block.columns) if block.format == "auto" else block.format
    too_long = block.too_long
    assert too_long != "auto", "the job is resolved before its data is opened"
    settings = RowSettings(found, tuple(sorted(block.columns.items())), block.train_on, too_long, seq_len)
    wanted = source.size_bytes > STREAM_ABOVE if block.stream == "auto" else block.stream
    streams = bool(wanted) and may_stream and job.steps is not None
    if block.stream is True and job.steps is None:
        raise UserError(f"{block.path} is streamed, so its rows are not counted beforehand: give `steps`, not `epochs`")
    cache = (open_stream if streams else open_cache)(source, codec.for_template(block.template, base), settings, report)
    return TokenisedSource(block, source, found, cache, streams)


def _sequences(
    job: Job, sources: Sequence[TokenisedSource], held_out: Sequence[np.ndarray], capacity: int | None
) -> Sequences:
    rows = [
        Stream(s.cache) if s.streams else Selection(s.cache, np.flatnonzero(~mask))
        for s, mask in zip(sources, held_out, strict=True)
    ]
    for s, r in zip(sources, rows, strict=True):
        if (s.cache.ready if s.streams else r.rows) == 0:
            reasons = ", ".join(sorted({d.reason for d in s.cache.summaries[0].dropped})[:3]) if s.cache.summaries else ""
            raise UserError(f"{s.source.name} has no row to train on" + (f" ({reasons})" if reasons else ""))
    caches = [s.cache for s in sources]
    shares: Sequence[float] | None = [s.block.weight for s in sources if s.block.weight is not None] or None
    endless = any(s.streams for s in sources)
    sizes = [max(1, s.source.size_bytes) for s in sources] if endless else [r.rows for r in rows]
    if shares is None and job.mix.temperature is not None:
        shares = temperature_shares(sizes, job.mix.temperature)
    if endless:
        mixture = weighted(rows, shares or sizes, job.seed, STREAM_PATTERN)
    elif shares is None:
        mixture = proportional(rows, job.seed)
    else:
        mixture = weighted(rows, shares, job.seed, sum(sizes))
    return Sequences(caches, mixture, capacity, endless=endless)


def epochs_per_source(corpus: Corpus, sequences: int) -> list[tuple[str, int, float]]:
    """(name, draws, passes) of each source after so many sequences: what a mixture really does to small sources."""
    mixture = corpus.sequences.mixture
    draws = corpus.sequences.draws_of(sequences)
    counts = pattern_counts(mixture.counts, draws) if draws >= len(mixture.counts) else mixture.counts
    return [
        (s.source.name, n, n / max(1, s.cache.ready if s.streams else int((~mask).sum())))
        for s, mask, n in zip(corpus.sources, corpus.held_out, counts, strict=True)
    ]
