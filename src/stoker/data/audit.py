"""The data audit: the rows and tokens that are trained on, those that are not, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stoker.data.audit_gate import audit_problems, drop_reasons
from stoker.data.corpus import Corpus, special_tokens_of
from stoker.data.files.rows import Rejected
from stoker.data.mixture_report import Drawn, mixture_parts
from stoker.data.sample_preview import SamplePreview, some_samples
from stoker.data.text_codec import TextCodec
from stoker.errors import Problem
from stoker.job.load_job import LoadedJob
from stoker.job.task_spec import task_of

SAMPLES = 3
DROPPED_SHOWN = 10_000
JSON_NAMES = {  # where they differ from the attributes'
    "special_tokens": "special_tokens_in_text",
    "stop_missing": "stop_token_missing",
    "overlap": "evaluation_overlap",
    "mixture": "sources",
    "evaluation_rows": "evaluation",
    "problems": "errors",
}


@dataclass(frozen=True)
class Ignored:
    """A field with content in the rows of a source that never reaches their text."""

    source: str
    field: str
    rows: int


@dataclass(frozen=True)
class Audit:
    """The report on a run's data, which accounts for every row.

    Attributes:
        prompts: whether the rows are prompts, of which no token is trained: a policy learns from its own answers.
        rows_in: rows read: used + dropped.
        rows_used: rows that give at least one training sequence.
        rows_cut: used rows that lost tokens to ``seq_len``.
        rows_split: used rows that became several sequences.
        rows_dropped: rows that give no sequence.
        reasons: number of dropped rows by reason.
        dropped: the dropped rows (the first `DROPPED_SHOWN` of them).
        fields_ignored: fields with content that never reach the text or the mask, the most frequent first.
        turns_untrained: the assistant's turns whose weight is 0.
        special_tokens: (source, special tokens in its content, ``text`` or ``keep``) of each source with some.
        sequences: training sequences before packing, held-out ones included.
        tokens, trained_tokens: over all sequences; the first token of a sequence is never trained.
        tokens_lost: tokens truncated at the end of rows that were too long.
        stop_token_trained: whether an answer ends with a trained stop token.
        stop_missing: rows that were not cut and whose last answer does not end with a stop token.
        duplicates: sequences that equal another one.
        contradictions: sequences that one row labels good and another row bad; both rows are trained on.
        overlap: training sequences that the model is also evaluated on.
        prompt_not_prefix: rows with a prompt that, as served, is not an exact prefix.
        held_out: sequences held out for evaluation.
        length_histogram: tokens up to (a power of two) -> sequences.
        longest, mean: lengths in tokens.
        samples: a few sequences.
        formats: the format of each source, by name.
        evaluation_rows: (read, dropped) of ``evaluate.data``.
        problems: reasons to refuse training.
        mixture: the rows and tokens that the run draws from each source.
        complete: false while a stream is still being tokenised; the report then covers the rows read so far.
    """

    prompts: bool
    rows_in: int
    rows_used: int
    rows_cut: int
    rows_split: int
    rows_dropped: int
    reasons: dict[str, int]
    dropped: tuple[Rejected, ...]
    fields_ignored: tuple[Ignored, ...]
    turns_untrained: int
    special_tokens: tuple[tuple[str, int, str], ...]
    sequences: int
    tokens: int
    trained_tokens: int
    tokens_lost: int
    stop_token_trained: bool
    stop_missing: int
    duplicates: int
    contradictions: int
    overlap: int
    prompt_not_prefix: int
    held_out: int
    length_histogram: dict[int, int]
    longest: int
    mean: float
    samples: tuple[SamplePreview, ...]
    formats: dict[str, str]
    mixture: tuple[Drawn, ...]
    evaluation_rows: tuple[int, int]
    complete: bool
    problems: tuple[Problem, ...]

    def as_json(self) -> dict[str, Any]:
        """Converts the report to JSON types."""
        values = json.loads(json.dumps(asdict(self)))  # lists, and keys that are strings
        read, dropped = self.evaluation_rows
        values |= {
            "special_tokens": sum(count for _, count, _ in self.special_tokens),
            "evaluation_rows": {"rows_in": read, "rows_dropped": dropped},
        }
        del values["longest"], values["mean"]
        return {"ok": not self.problems} | {JSON_NAMES.get(name, name): value for name, value in values.items()}


def audit(corpus: Corpus, codec: TextCodec, loaded: LoadedJob, samples: int = SAMPLES) -> Audit:
    """Builds the report from the counts in the token caches; nothing is tokenised again."""
    caches = [source.cache for source in corpus.sources]
    summaries = [summary for cache in caches for summary in cache.summaries]

    def column(name: str) -> np.ndarray:
        return np.concatenate([cache.column(name) for cache in caches])

    lengths, digests, stops, lost = column("length"), column("digest"), column("stops"), column("lost")
    good = column("good")
    last = ~column("continues")  # the last sequence of each row
    reasons = drop_reasons(summaries)
    rows_in, rows_dropped = sum(s.rows_in for s in summaries), sum(reasons.values())
    evaluation = [s for source in corpus.evaluation for s in source.cache.summaries]
    prompts = task_of(loaded.job).rows.prompts
    return Audit(
        prompts=prompts,
        rows_in=rows_in,
        rows_used=rows_in - rows_dropped,
        rows_cut=sum(s.rows_cut for s in summaries),
        rows_split=sum(s.rows_split for s in summaries),
        rows_dropped=rows_dropped,
        reasons=dict(reasons.most_common()),
        dropped=tuple(d for s in summaries for d in s.dropped)[:DROPPED_SHOWN],
        sequences=len(lengths),
        tokens=int(lengths.sum()),
        trained_tokens=0 if prompts else sum(s.trained for s in summaries),
        tokens_lost=int(lost.sum()),
        stop_token_trained=not prompts and bool(stops.any()),
        stop_missing=0 if prompts else int((last & ~stops & (lost == 0)).sum()),
        duplicates=len(digests) - len(np.unique(digests)),
        contradictions=len(np.intersect1d(digests[good], digests[~good])),
        overlap=_overlap(corpus),
        prompt_not_prefix=int((last & ~column("exact")).sum()),
        held_out=sum(int(mask.sum()) for mask in corpus.held_out),
        length_histogram=_histogram(lengths),
        longest=int(lengths.max(initial=0)),
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        samples=tuple(some_samples(corpus, codec, samples)),
        formats={source.source.name: source.format for source in corpus.sources},
        evaluation_rows=(sum(s.rows_in for s in evaluation), sum(drop_reasons(evaluation).values())),
        complete=all(cache.complete for cache in caches),
        problems=tuple(audit_problems(corpus, codec, loaded)),
        mixture=mixture_parts(corpus, loaded.job),
        fields_ignored=tuple(_ignored(corpus)),
        turns_untrained=sum(s.turns_untrained for s in summaries),
        special_tokens=tuple(_special_tokens(corpus)),
    )


def _special_tokens(corpus: Corpus) -> Iterator[tuple[str, int, str]]:
    for source in (*corpus.sources, *corpus.evaluation):
        count = sum(s.special_tokens for s in source.cache.summaries)
        if count:
            yield source.source.name, count, special_tokens_of(source.block, source.format)


def _ignored(corpus: Corpus) -> Iterator[Ignored]:
    for source in (*corpus.sources, *corpus.evaluation):
        counts = sum((Counter(s.ignored) for s in source.cache.summaries), Counter[str]())
        for field_, rows in counts.most_common():
            yield Ignored(source.source.name, field_, rows)


def _overlap(corpus: Corpus) -> int:
    """Counts the training sequences that are also evaluated on, as held-out rows or rows of ``evaluate.data``."""
    trained, evaluated = [], [source.cache.column("digest") for source in corpus.evaluation]
    for source, mask in zip(corpus.sources, corpus.held_out, strict=True):
        digests = source.cache.column("digest")
        held_out = np.zeros(len(digests), dtype=bool)  # a stream may have grown since it was opened
        held_out[: len(mask)] = mask
        trained.append(digests[~held_out])
        evaluated.append(digests[held_out])
    return int(np.isin(np.concatenate(trained), np.concatenate(evaluated)).sum())


def _histogram(lengths: np.ndarray) -> dict[int, int]:
    """Counts sequences by length, in bins that end at powers of two."""
    bounds = 1 << np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return {int(bound): int(count) for bound, count in zip(*np.unique(bounds, return_counts=True), strict=True)}
