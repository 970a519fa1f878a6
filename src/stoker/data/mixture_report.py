"""Rows, tokens, shares and epochs that a run draws from each source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.data.corpus import Corpus
from stoker.data.mix import pattern_counts
from stoker.job.resolved import ResolvedJob


@dataclass(frozen=True)
class Drawn:
    """A source's part in a run.

    Attributes:
        rows: sequences drawn, before packing, with repeats.
        tokens: their tokens, by the mean length of the source's rows.
        share: of all tokens of the run.
        epochs: passes over the source; over what has been tokenised so far, for a stream.
    """

    name: str
    rows: int
    tokens: int
    share: float
    epochs: float


def mixture_parts(corpus: Corpus, job: ResolvedJob) -> tuple[Drawn, ...]:
    """Returns the parts of a resolved job's sources."""
    kept = [
        source.cache.column("length")[: len(mask)][~mask].reshape(-1, corpus.unit_size).sum(axis=1)
        for source, mask in zip(corpus.sources, corpus.held_out, strict=True)
    ]
    means = [float(lengths.mean()) if len(lengths) else 0.0 for lengths in kept]
    counts = pattern_counts(corpus.sequences.mixture.counts, _draws(corpus, job, means))
    tokens = [count * mean for count, mean in zip(counts, means, strict=True)]
    total = sum(tokens) or 1.0
    return tuple(
        Drawn(source.source.name, count, round(own), own / total, count / max(1, len(lengths)))
        for source, count, own, lengths in zip(corpus.sources, counts, tokens, kept, strict=True)
    )


def _draws(corpus: Corpus, job: ResolvedJob, means: Sequence[float]) -> int:
    """Rows drawn in the whole run; packed sequences of streams are taken to be filled without a gap."""
    sequences, batch = corpus.sequences, job.train.batch
    if not sequences.mixture.pattern:
        return 0  # every row is dropped
    if job.steps is None:
        assert sequences.epoch_rows is not None, "a stream has no epochs"
        return int(sequences.epoch_rows * (job.epochs or 1.0) + 1e-9)
    if sequences.capacity is None:
        return job.steps * batch
    if sequences.epoch_rows is not None:
        return round(job.steps * batch * sequences.draws_per_sequence())
    shares = np.array(sequences.mixture.counts, dtype=np.float64)
    mean = float((shares * means).sum() / max(1.0, shares.sum()))
    return round(job.steps * batch * sequences.capacity / max(1.0, mean))


def in_words(parts: Sequence[Drawn]) -> str:
    """``a.jsonl 4,800 rows, 210,000 tokens (75.0%), 0.67 epochs; ...``"""
    return "; ".join(
        f"{part.name} {part.rows:,} rows, {part.tokens:,} tokens ({part.share:.1%}), {part.epochs:.2f} epochs"
        for part in parts
    )
