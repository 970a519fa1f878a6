"""The audit: what of the data is trained on, what is not and why; and the gate that keeps bad data out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.byte_streams import utf8_advice
from stoker.data.corpus import Corpus, TokenisedSource, special_tokens_of
from stoker.data.ignored_fields import LOST_ANSWER
from stoker.data.mixture_report import Drawn, drawn
from stoker.data.readers import NOT_UTF8
from stoker.data.render_row import TEMPLATE_REFUSES
from stoker.data.rows import Rejected
from stoker.data.token_cache import ShardSummary, reason_kind
from stoker.data.tokenise import JUDGED_BAD, NO_ROOM, TOO_LONG, TextCodec
from stoker.errors import Problem
from stoker.job.job_to_yaml import scalar
from stoker.job.load_job import LoadedJob
from stoker.job.task import task_of

SAMPLES = 3
DROPPED_SHOWN = 10_000


@dataclass(frozen=True)
class ShownSample:
    """One training sequence, token by token."""

    source: str
    row: int
    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    trained: tuple[bool, ...]


@dataclass(frozen=True)
class Ignored:
    """A field that the rows of a source give and that their text does not say."""

    source: str
    field: str
    rows: int


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
        fields_ignored: fields with content that never reach the text or the mask, the most frequent first.
        turns_untrained: the assistant's turns whose weight is 0.
        special_tokens: (source, how many special tokens its content holds, ``text`` or ``keep``), of those with some.
        sequences: training sequences before packing, held-out ones included.
        tokens, trained_tokens: of all sequences; a sequence's first token is never trained.
        stop_token_trained: whether an answer ends with a trained stop token.
        stop_missing: rows that were not cut and whose last answer does not end with a stop token.
        duplicates: sequences that another one equals.
        overlap: training sequences that the model is also evaluated on.
        prompt_not_prefix: rows with a prompt that, as served, is not an exact prefix.
        held_out: sequences held out for evaluation.
        length_histogram: tokens up to (a power of two) -> sequences.
        longest, mean: of the lengths in tokens.
        samples: a few sequences.
        formats: the format of each source, by name.
        evaluation_rows: (read, dropped) of ``evaluate.data``.
        problems: what the gate refuses; empty where training may begin.
        drawn: what the run takes of each source.
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
    samples: tuple[ShownSample, ...]
    formats: dict[str, str]
    evaluation_rows: tuple[int, int]
    complete: bool
    problems: tuple[Problem, ...] = field(default=())
    drawn: tuple[Drawn, ...] = ()
    fields_ignored: tuple[Ignored, ...] = ()
    turns_untrained: int = 0
    special_tokens: tuple[tuple[str, int, str], ...] = ()

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
            "fields_ignored": [asdict(ignored) for ignored in self.fields_ignored],
            "turns_untrained": self.turns_untrained,
            "special_tokens_in_text": sum(count for _, count, _ in self.special_tokens),
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
                {
                    "source": s.source,
                    "row": s.row,
                    "tokens": list(s.tokens),
                    "ids": list(s.ids),
                    "trained": list(s.trained),
                }
                for s in self.samples
            ],
            "formats": self.formats,
            "sources": [part.as_json() for part in self.drawn],
            "evaluation": {"rows_in": self.evaluation_rows[0], "rows_dropped": self.evaluation_rows[1]},
            "complete": self.complete,
            "errors": [problem_json(problem) for problem in self.problems],
        }


def problem_json(problem: Problem) -> dict[str, Any]:
    """A problem as other programs read it."""
    return asdict(problem)


def audit(corpus: Corpus, codec: TextCodec, loaded: LoadedJob, samples: int = SAMPLES) -> Audit:
    """Adds up what tokenising counted. Nothing is tokenised again: the caches hold all that is needed."""
    caches = [source.cache for source in corpus.sources]
    summaries = [summary for cache in caches for summary in cache.summaries]

    def column(name: str) -> np.ndarray:
        return np.concatenate([cache.column(name) for cache in caches])

    lengths, digests, stops = column("length"), column("digest"), column("stops")
    last = ~column("continues")  # the last sequence of each row
    reasons = _reasons(summaries)
    rows_in, rows_dropped = sum(s.rows_in for s in summaries), sum(reasons.values())
    evaluation = [s for source in corpus.evaluation for s in source.cache.summaries]
    return Audit(
        rows_in=rows_in,
        rows_used=rows_in - rows_dropped,
        rows_cut=sum(s.rows_cut for s in summaries),
        rows_split=sum(s.rows_split for s in summaries),
        rows_dropped=rows_dropped,
        reasons=dict(reasons.most_common()),
        dropped=tuple(d for s in summaries for d in s.dropped)[:DROPPED_SHOWN],
        sequences=len(lengths),
        tokens=int(lengths.sum()),
        trained_tokens=sum(s.trained for s in summaries),
        stop_token_trained=bool(stops.any()),
        stop_missing=int((last & ~stops & ~column("cut")).sum()),
        duplicates=len(digests) - len(np.unique(digests)),
        overlap=_overlap(corpus),
        prompt_not_prefix=int((last & ~column("exact")).sum()),
        held_out=sum(int(mask.sum()) for mask in corpus.held_out),
        length_histogram=_histogram(lengths),
        longest=int(lengths.max(initial=0)),
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        samples=tuple(_samples(corpus, codec, samples)),
        formats={source.source.name: source.format for source in corpus.sources},
        evaluation_rows=(sum(s.rows_in for s in evaluation), sum(_reasons(evaluation).values())),
        complete=all(cache.complete for cache in caches),
        problems=tuple(_gate(corpus, codec, loaded)),
        drawn=drawn(corpus, loaded.job),
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


def _reasons(summaries: Sequence[ShardSummary]) -> Counter[str]:
    """How many rows were dropped for which reason."""
    return sum((Counter(s.reasons) for s in summaries), Counter())


def _overlap(corpus: Corpus) -> int:
    """Sequences that are trained on and evaluated on, whether held out or of ``evaluate.data``."""
    trained, evaluated = [], [source.cache.column("digest") for source in corpus.evaluation]
    for source, mask in zip(corpus.sources, corpus.held_out, strict=True):
        digests = source.cache.column("digest")
        held_out = np.zeros(len(digests), dtype=bool)  # a stream may have grown since it was opened
        held_out[: len(mask)] = mask
        trained.append(digests[~held_out])
        evaluated.append(digests[held_out])
    return int(np.isin(np.concatenate(trained), np.concatenate(evaluated)).sum())


def _histogram(lengths: np.ndarray) -> dict[int, int]:
    """Sequences by the power of two that holds them."""
    bounds = 1 << np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return {int(bound): int(count) for bound, count in zip(*np.unique(bounds, return_counts=True), strict=True)}


def _samples(corpus: Corpus, codec: TextCodec, count: int) -> list[ShownSample]:
    """Sequences spread evenly over the sources."""
    found: list[ShownSample] = []
    for i, source in enumerate(corpus.sources):
        share = (count + i) // len(corpus.sources)
        ready = source.cache.ready
        rows = np.unique(np.linspace(0, ready - 1, share).astype(int)) if ready and share else ()
        found += [_sample(source, int(row), codec) for row in rows]
    return found


def _sample(source: TokenisedSource, index: int, codec: TextCodec) -> ShownSample:
    row, (file, number) = source.cache[index], source.cache.origin(index)
    ids = tuple(row.ids.tolist())
    trained = (False, *row.trained[1:].tolist())
    return ShownSample(file, number, token_texts(codec, ids), ids, trained)


def samples_of(corpus: Corpus, codec: TextCodec, file: str, row: int) -> tuple[list[ShownSample], list[Rejected]]:
    """The sequences of one row, or why it was dropped.

    Args:
        file: the name of a source as the job has it, or a file's, its folders left out or not.
        row: as the reader counts.
    """
    found: list[ShownSample] = []
    dropped: list[Rejected] = []
    for source in (*corpus.sources, *corpus.evaluation):
        cache, any_file = source.cache, file in (source.source.name, source.block.path)
        for index in np.flatnonzero(cache.column("row") == row):
            if any_file or _names(file, cache.origin(int(index))[0]):
                found.append(_sample(source, int(index), codec))
        for summary in cache.summaries:
            dropped += [d for d in summary.dropped if d.row == row and (any_file or _names(file, d.source))]
    return found, dropped


def _names(name: str, file: str) -> bool:
    return file == name or file.endswith(f"/{name}")


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


def _gate(corpus: Corpus, codec: TextCodec, loaded: LoadedJob) -> list[Problem]:
    """What data must not be trained on as it is."""
    problems = []
    for i, source in enumerate(corpus.sources):
        problems += _source_gate(source, f"data[{i}]", codec, loaded)
    for i, source in enumerate(corpus.evaluation):
        problems += _source_gate(source, f"evaluate.data[{i}]", codec, loaded)
    return problems


def _advice(source: TokenisedSource, key: str) -> str:
    """What to do about the most frequent reason for which rows are dropped; empty where there is nothing particular."""
    summaries = source.cache.summaries
    reason = next((reason for reason, _ in _reasons(summaries).most_common(1)), "")
    if reason == NOT_UTF8:
        file = next(d.source for s in summaries for d in s.dropped if reason_kind(d.reason) == reason)
        return utf8_advice(Path(file))
    if reason in (NO_ROOM, TOO_LONG):
        return f"raise train.seq_len: the longest row has {max(s.longest for s in summaries):,} tokens"
    if reason == JUDGED_BAD:
        return f"write `{key}.format: judged` to train on the good ones alone, or `messages` to train on all of them"
    if reason.startswith(TEMPLATE_REFUSES) or reason in LOST_ANSWER.values():
        return f"name a template that writes such rows, {key}.template"
    return ""


def _source_gate(source: TokenisedSource, key: str, codec: TextCodec, loaded: LoadedJob) -> list[Problem]:
    name, cache = source.source.name, source.cache
    summaries = cache.summaries
    rows_in, reasons = sum(s.rows_in for s in summaries), _reasons(summaries)
    dropped = sum(reasons.values())
    most = ", ".join(f"{reason} ({n})" for reason, n in reasons.most_common(3))
    if not sum(s.trained for s in summaries):
        message = f"{name}: nothing of it would be trained, all of its {rows_in} rows are dropped: {most}"
        advice = _advice(source, key) or "mend the rows; `stoker data` names each"
        return [loaded.problem(f"{key}.path", message, advice)]
    problems = []
    if (source.format == "preference") != task_of(loaded.job).pairs:
        kinds = ("pairs, chosen and rejected", "one answer a row")
        rows, wanted = kinds if source.format == "preference" else reversed(kinds)
        message = f"{name}: its rows are {rows}; task {loaded.job.task} trains on {wanted}"
        advice = f"for the chosen ones alone write {key}.format: prompt, with columns: {{completion: chosen}}"
        problems.append(loaded.problem(f"{key}.path", message, advice))
    if source.block.format == "judged":  # the job says it: bad answers are to be left out
        dropped -= reasons[JUDGED_BAD]
    if dropped > source.block.max_dropped * rows_in:
        message = (
            f"{name}: {dropped} of {rows_in} rows are dropped ({dropped / rows_in:.1%}, at most "
            f"{source.block.max_dropped:.1%} are allowed): {most}"
        )
        advice = _advice(source, key) or "mend the rows"
        problems.append(loaded.problem(f"{key}.path", message, f"{advice}, or raise {key}.max_dropped"))
    if source.format != "text" and not cache.column("stops").any():
        message = f"{name}: the stop token is never trained, so the model would never learn to end an answer"
        if cache.column("cut").all():
            advice = "every row is cut before its answer ends: raise train.seq_len"
        else:
            advice = f"take a template that writes it behind an answer, such as {key}.template: plain"
            if ending := _ending(source, codec):
                advice = f"its answers end with {ending}: write model.stop: {scalar(ending)}, or {advice}"
        problems.append(loaded.problem(f"{key}.template", message, advice))
    return problems


def _ending(source: TokenisedSource, codec: TextCodec) -> str | None:
    """The special token that the last answer of a source's first row ends with, if any, white space left out."""
    row = source.cache[0]
    special = {i: token.content for i, token in codec.tokenizer.get_added_tokens_decoder().items() if token.special}
    for number in reversed(row.ids[row.trained].tolist()):
        if number in special or codec.tokenizer.decode([number]).strip():
            return special.get(number)
    return None
