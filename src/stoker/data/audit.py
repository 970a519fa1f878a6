"""The audit: what of the data is trained on, what is not and why; and the gate that bad data does not pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.data.corpus import Corpus, TokenisedSource
from stoker.data.record import Rejected
from stoker.data.tokenise import TextCodec
from stoker.errors import Problem
from stoker.job.load import LoadedJob

SAMPLES = 3
DROPPED_SHOWN = 10_000


@dataclass(frozen=True)
class Sample:
    """One training sequence, token by token."""

    source: str
    row: int
    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    trained: tuple[bool, ...]


@dataclass(frozen=True)
class Audit:
    """Every row accounted for.

    Attributes:
        rows_in: rows read: used + dropped.
        rows_used: rows that give at least one training sequence.
        rows_cut: of those, rows that lost tokens to ``seq_len``.
        rows_split: of those, rows that became several sequences.
        rows_dropped: rows that give none, each with a reason.
        reasons: how many rows were dropped for which reason.
        dropped: the dropped rows (the first `DROPPED_SHOWN` of them).
        sequences: training sequences before packing, held-out ones included.
        tokens, trained_tokens: of all sequences; a sequence's first token is never trained.
        stop_token_trained: whether an answer ends with a trained stop token.
        stop_missing: sequences that were not cut and whose answer does not end with a stop token.
        duplicates: sequences that another one equals.
        overlap: training sequences that are also in ``evaluate.data``.
        prompt_not_prefix: sequences whose prompt, as served, is not an exact prefix.
        held_out: sequences held out for evaluation.
        length_histogram: tokens up to (a power of two) -> sequences.
        longest, mean: of the lengths in tokens.
        samples: a few sequences.
        problems: what the gate refuses; empty where training may begin.
        complete: false while a stream is still being tokenised: then it speaks of what has come so far.
    """

    rows_in: int
    rows_used: int
    rows_cut: int
    rows_split: int
    rows_dropped: int
    reasons: dict[str, int]
    dropped: tuple[Rejected, ...]
    sequences: int
    tokens: int
    trained_tokens: int
    stop_token_trained: bool
    stop_missing: int
    duplicates: int
    overlap: int
    prompt_not_prefix: int
    held_out: int
    length_histogram: dict[int, int]
    longest: int
    mean: float
    samples: tuple[Sample, ...]
    formats: dict[str, str]
    complete: bool
    problems: tuple[Problem, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """The report as other programs read it."""
        return {
            "ok": not self.problems,
            "rows_in": self.rows_in,
            "rows_used": self.rows_used,
            "rows_cut": self.rows_cut,
            "rows_split": self.rows_split,
            "rows_dropped": self.rows_dropped,
            "reasons": self.reasons,
            "dropped": [{"source": d.source, "row": d.row, "reason": d.reason} for d in self.dropped],
            "sequences": self.sequences,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "stop_token_trained": self.stop_token_trained,
            "stop_token_missing": self.stop_missing,
            "duplicates": self.duplicates,
            "evaluation_overlap": self.overlap,
            "prompt_not_prefix": self.prompt_not_prefix,
            "held_out": self.held_out,
            "length_histogram": {str(k): v for k, v in self.length_histogram.items()},
            "samples": [
                {"source": s.source, "row": s.row, "tokens": list(s.tokens), "ids": list(s.ids), "trained": list(s.trained)}
                for s in self.samples
            ],
            "formats": self.formats,
            "complete": self.complete,
            "errors": [str(p.message) for p in self.problems],
        }


def audit(corpus: Corpus, codec: TextCodec, loaded: LoadedJob, samples: int = SAMPLES) -> Audit:
    """Adds up what tokenising counted. Nothing is tokenised again: the caches hold all that is needed."""
    caches = [source.cache for source in corpus.sources]
    summaries = [summary for cache in caches for summary in cache.summaries]
    lengths = np.concatenate([cache.column("length") for cache in caches])
    digests = np.concatenate([cache.column("digest") for cache in caches])
    stops = np.concatenate([cache.column("stops") for cache in caches])
    cut = np.concatenate([cache.column("cut") for cache in caches])
    exact = np.concatenate([cache.column("exact") for cache in caches])
    evaluation = [source.cache.column("digest") for source in corpus.evaluation]
    dropped = [d for summary in summaries for d in summary.dropped]
    reasons = sum((Counter(s.reasons) for s in summaries), Counter())
    rows_in, rows_dropped = sum(s.rows_in for s in summaries), sum(reasons.values())
    return Audit(
        rows_in=rows_in,
        rows_used=rows_in - rows_dropped,
        rows_cut=sum(s.rows_cut for s in summaries),
        rows_split=sum(s.rows_split for s in summaries),
        rows_dropped=rows_dropped,
        reasons=dict(reasons.most_common()),
        dropped=tuple(dropped[:DROPPED_SHOWN]),
        sequences=len(lengths),
        tokens=int(lengths.sum()),
        trained_tokens=sum(s.trained for s in summaries),
        stop_token_trained=bool(stops.any()),
        stop_missing=int((~stops & ~cut).sum()),
        duplicates=len(digests) - len(np.unique(digests)),
        overlap=int(np.isin(digests, np.concatenate(evaluation)).sum()) if evaluation else 0,
        prompt_not_prefix=int((~exact).sum()),
        held_out=sum(int(mask.sum()) for mask in corpus.held_out),
        length_histogram=_histogram(lengths),
        longest=int(lengths.max(initial=0)),
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        samples=tuple(_samples(corpus, codec, samples)),
        formats={source.source.name: source.format for source in corpus.sources},
        complete=all(cache.complete for cache in caches),
        problems=tuple(_gate(corpus, loaded)),
    )


def _histogram(lengths: np.ndarray) -> dict[int, int]:
    """Sequences by the power of two that holds them."""
    bounds = 1 << np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return {int(bound): int(count) for bound, count in zip(*np.unique(bounds, return_counts=True), strict=True)}


def _samples(corpus: Corpus, codec: TextCodec, count: int) -> list[Sample]:
    """Sequences spread evenly over the sources."""
    found = []
    for source in corpus.sources:
        share = max(1, count // len(corpus.sources))
        rows = np.unique(np.linspace(0, max(0, source.cache.ready - 1), share).astype(int)) if source.cache.ready else []
        for row in rows:
            entry, (file, number) = source.cache[int(row)], source.cache.origin(int(row))
            ids = tuple(int(i) for i in entry.ids)
            trained = (False, *(bool(t) for t in entry.trained[1:]))
            found.append(Sample(file, number, token_texts(codec, ids), ids, trained))
    return found[:count] if count else []


def token_texts(codec: TextCodec, ids: Sequence[int]) -> tuple[str, ...]:
    """The text of each token, so that together they are the text of the whole: a character of several tokens
    stands with the last of them."""
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


def _gate(corpus: Corpus, loaded: LoadedJob) -> list[Problem]:
    """What data must not be trained on as it is."""
    problems = []
    for i, source in enumerate(corpus.sources):
        problems += _source_gate(source, f"data[{i}]", loaded)
    return problems


def _source_gate(source: TokenisedSource, key: str, loaded: LoadedJob) -> list[Problem]:
    name, summaries, cache = source.source.name, source.cache.summaries, source.cache
    rows_in = sum(s.rows_in for s in summaries)
    dropped = sum(sum(s.reasons.values()) for s in summaries)
    if not sum(s.trained for s in summaries):
        return [loaded.problem(f"{key}.path", f"{name}: nothing of it would be trained", "look at the rows with `stoker data`")]
    problems = []
    if dropped > source.block.max_dropped * rows_in:
        reasons = sum((Counter(s.reasons) for s in summaries), Counter())
        most = ", ".join(f"{reason} ({n})" for reason, n in reasons.most_common(3))
        problems.append(
            loaded.problem(
                f"{key}.path",
                f"{name}: {dropped} of {rows_in} rows are dropped ({dropped / rows_in:.1%}, at most "
                f"{source.block.max_dropped:.1%} are allowed): {most}",
                "mend the rows, or raise data[].max_dropped",
            )
        )
    if source.format != "text" and not cache.column("stops").any() and not cache.column("cut").all():
        problems.append(
            loaded.problem(
                f"{key}.template",
                f"{name}: the stop token is never trained, so the model would never learn to end an answer",
                "use a template that writes the end token behind an answer (data[].template: chatml or plain)",
            )
        )
    return problems
