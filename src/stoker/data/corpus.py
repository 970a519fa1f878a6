"""The job's data, opened for training: sources, token caches, mixture, sequences, and the held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stoker.data.build_cache import Report, find_format, open_cache, open_stream
from stoker.data.files.readers import decode
from stoker.data.files.rows import Message, Raw, Rejected
from stoker.data.formats import all_formats as formats
from stoker.data.formats.expected_answer import prompt_and_expected
from stoker.data.formats.pair_formats import PAIRS
from stoker.data.held_out import hold_out
from stoker.data.mix import proportional, temperature_shares, weighted
from stoker.data.order import permute
from stoker.data.sequences import Document, GrowingSource, Selection, Sequences, by_length
from stoker.data.sources import Source, empty_source, open_source
from stoker.data.text_codec import TextCodec
from stoker.data.token_cache import TokenCache
from stoker.data.tokenise import RowSettings
from stoker.errors import Problem, RunFailed, UserError
from stoker.job.inputs import by_source_key
from stoker.job.load_job import LoadedJob
from stoker.job.resolved import ResolvedJob, ResolvedSource
from stoker.job.task_spec import task_of, unit_size_of

STREAM_ABOVE = 2 << 30  # bytes of a source from which `stream: auto` streams
STREAM_PATTERN = 1024  # draws over which the weights of streamed sources hold


@dataclass(frozen=True)
class TokenisedSource:
    """One source with its tokens.

    Attributes:
        prompts: whether the model answers its rows itself.
    """

    block: ResolvedSource
    source: Source
    format: str
    cache: TokenCache
    streams: bool
    prompts: bool = False

    @cached_property
    def _rows(self) -> dict[tuple[str, int], Raw]:
        return {(raw.source, raw.row): raw for raw in self.source.rows() if isinstance(raw, Raw)}

    def row_of(self, index: int) -> tuple[Raw, dict[str, Any]]:
        """Returns the row of a sequence as in its file, and its columns.

        The source is read again, as its tokens do not hold all columns; its rows stay encoded until they are requested.
        A row is found by its file at tokenisation; equal content in another folder matches by file name.
        """
        file, number = self.cache.origin(index)
        raw = self._rows.get((file, number))
        if raw is None:
            here = [
                raw for (name, row), raw in self._rows.items() if row == number and Path(name).name == Path(file).name
            ]
            if len(here) != 1:
                message = f"row {number} of {file} is no longer in the data, or is in several files of the same name"
                raise RunFailed(message)
            raw = here[0]
        value = decode(raw)
        assert not isinstance(value, Rejected)
        return raw, value if isinstance(value, dict) else {"text": value}

    def prompt_and_expected(self, fields: dict[str, Any]) -> tuple[Sequence[Message], Any]:
        """Returns the prompt of a row's columns, and the expected answer; None without."""
        example = formats.parse(fields, self.format, self.block.columns, prompts=self.prompts)
        return prompt_and_expected(example, fields)


@dataclass(frozen=True)
class Corpus:
    """The data that a run trains on and is evaluated on.

    Attributes:
        sources: the training sources.
        held_out: the mask of held-out rows of each training source.
        evaluation: the sources of ``evaluate.data``.
        sequences: the training sequences in order.
        evaluated: number of sequences, or of pairs, in an evaluation; None for all.
        unit_size: consecutive sequences that form one unit: 2 where a row is a pair of answers.
    """

    sources: tuple[TokenisedSource, ...]
    held_out: tuple[np.ndarray, ...]
    evaluation: tuple[TokenisedSource, ...]
    sequences: Sequences
    evaluated: int | None = None
    unit_size: int = 1

    @property
    def has_held_out(self) -> bool:
        """Whether there are documents of an evaluation."""
        return any(mask.any() for mask in self.held_out) or any(source.cache.rows for source in self.evaluation)

    def evaluation_documents(self) -> list[Document]:
        """Returns the documents of an evaluation, the same every time; longest last, for even batches."""
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
        units, size = len(documents) // self.unit_size, self.unit_size
        if self.evaluated is not None and units > self.evaluated:
            chosen = permute(np.arange(self.evaluated), units, 0)
            documents = [d for i in chosen for d in documents[i * size : (i + 1) * size]]
        return by_length(documents, size)

    def read_whole(self) -> None:
        """Waits until every row is tokenised, those of streams too."""
        try:
            for source in self.sources:
                _ = source.cache.rows
        finally:
            self.close()

    def close(self) -> None:
        """Ends the builds that still run in the background."""
        for source in self.sources:
            source.cache.close()


def open_corpus(
    job: ResolvedJob,
    codec: TextCodec,
    *,
    seq_len: int,
    base: Path | None = None,
    report: Report | None = None,
    loaded: LoadedJob | None = None,
) -> Corpus:
    """Opens the data of a resolved language job, and tokenises sources that are not in the cache.

    A source with nothing to train on is opened too; the audit reports the reasons.

    Args:
        seq_len: tokens of the longest sequence.
        base: the folder that relative paths start from.
        report: called with the progress.
        loaded: the loaded job file, so that problems name a line.

    Raises:
        UserError: sources cannot be read or their columns fit no format; the error names all of them.
    """
    base = base or Path.cwd()
    opened: list[TokenisedSource] = []
    problems: list[Problem] = []
    try:
        for key, block in by_source_key(job.data, job.evaluate.data).items():
            may_stream = key.startswith("data[")
            try:
                opened.append(tokenise_source(block, job, codec, seq_len, base, report, may_stream=may_stream))
            except RunFailed:
                raise
            except UserError as error:
                problems += [_located(problem, f"{key}.{problem.key or 'path'}", loaded) for problem in error.problems]
        if problems:
            raise UserError(*problems)
    except BaseException:
        for source in opened:
            source.cache.close()
        raise
    sources, evaluation = tuple(opened[: len(job.data)]), tuple(opened[len(job.data) :])
    # Rows of another kind are refused by the audit.
    unit_size = unit_size_of(job) if all(source.format in PAIRS for source in opened) else 1
    held_out = _held_out(sources, job.evaluate.fraction, unit_size)
    capacity = seq_len * unit_size if job.train.pack else None
    sequences = _sequences(job, sources, held_out, capacity, unit_size)
    rows = job.evaluate.rows
    return Corpus(sources, held_out, evaluation, sequences, rows if isinstance(rows, int) else None, unit_size)


def _located(problem: Problem, key: str, loaded: LoadedJob | None) -> Problem:
    """Returns a problem at its key in the job, unless it is in a data file."""
    if problem.file:
        return problem
    located = replace(problem, key=key)
    return located if loaded is None else loaded.placed(located)


def _held_out(sources: Sequence[TokenisedSource], fraction: float, unit_size: int) -> tuple[np.ndarray, ...]:
    """Returns each source's mask of held-out rows: a fraction of its rows, and rows equal to a held-out row
    elsewhere.
    """
    masks, digests = [], []
    for source in sources:
        one, *others = source.cache.column("digest").reshape(-1, unit_size).T
        digests.append(reduce(np.bitwise_xor, others, one))
        # Nothing is held out of a stream: later rows cannot be compared with those already trained on.
        masks.append(np.zeros(len(digests[-1]), bool) if source.streams else hold_out(digests[-1], fraction))
    if len(sources) > 1 and fraction > 0:
        chosen = np.concatenate([d[mask] for d, mask in zip(digests, masks, strict=True)])
        for i, source in enumerate(sources):
            too = np.isin(digests[i], chosen)
            if not source.streams and not too.all():
                masks[i] |= too
    return tuple(np.repeat(mask, unit_size) for mask in masks)


def tokenise_source(
    block: ResolvedSource,
    job: ResolvedJob,
    codec: TextCodec,
    seq_len: int,
    base: Path,
    report: Report | None,
    *,
    may_stream: bool,
) -> TokenisedSource:
    """Tokenises one source.

    Raises:
        UserError: it cannot be read, has no row, or its columns fit no format.
    """
    source = open_source(block, base)
    task = task_of(job)
    kind = task.rows.kind(job)
    found: str = block.format
    if found == "auto":
        found = find_format(source, block.columns, "prompts" if task.rows.prompts else kind)
    columns = tuple(sorted(block.columns.items()))
    sampled = task.work.rollouts(job)
    train_on = "last" if task.rows.prompts else block.train_on  # a prompt is all that comes before the last answer
    settings = RowSettings(
        found,
        columns,
        train_on,
        block.too_long,
        seq_len,
        special_tokens_of(block, found),
        keep_bad=kind == "judged" or task.rows.prompts,
        prompts=task.rows.prompts,
        expected_check=task.rows.expected_check(job),
        sampled=sampled.tokens if sampled is not None else 0,
    )
    large = source.size_bytes > STREAM_ABOVE and kind == "answers" and not task.rows.prompts
    streams = (large if block.stream == "auto" else block.stream) and may_stream and job.steps is not None
    if block.stream is True and may_stream and job.steps is None:
        raise UserError(
            Problem(
                f"{block.path} is streamed, so its rows are not counted beforehand",
                "give `steps`, not `epochs`",
            )
        )
    if found != "text":  # documents are not rendered
        codec = codec.for_source(block, base)
    cache = (open_stream if streams else open_cache)(source, codec, settings, report)
    if not cache.summaries:  # a stream has its first shard by now
        raise UserError(Problem(*empty_source(source.name)))
    return TokenisedSource(block, source, found, cache, streams, task.rows.prompts)


def special_tokens_of(block: ResolvedSource, found: str) -> Literal["text", "keep"]:
    """Returns how special tokens in content are encoded; formats without a chat template keep them by default."""
    if block.special_tokens == "auto":
        return "keep" if found in ("text", "prompt") else "text"
    return block.special_tokens


def _sequences(
    job: ResolvedJob,
    sources: Sequence[TokenisedSource],
    held_out: Sequence[np.ndarray],
    capacity: int | None,
    unit_size: int,
) -> Sequences:
    rows = [
        GrowingSource(s.cache) if s.streams else Selection(s.cache, np.flatnonzero(~mask[::unit_size]))
        for s, mask in zip(sources, held_out, strict=True)
    ]
    endless = any(s.streams for s in sources)
    sizes = [(r.cache.ready if s.streams else r.rows) for s, r in zip(sources, rows, strict=True)]
    if endless:  # the rows of a stream are not counted yet; its bytes are known
        sizes = [max(1, s.source.size_bytes) if size else 0 for s, size in zip(sources, sizes, strict=True)]
    weights = [s.block.weight for s in sources]
    shares: Sequence[float] | None = None
    if any(weight is not None for weight in weights):  # a source without rows has share 0
        shares = [(weight or 0.0) if size else 0.0 for weight, size in zip(weights, sizes, strict=True)]
    elif job.mix.temperature is not None:
        shares = temperature_shares(sizes, job.mix.temperature)
    elif endless:
        shares = sizes
    if shares is None:
        mixture = proportional(rows, job.seed)
    else:
        mixture = weighted(rows, shares, job.seed, STREAM_PATTERN if endless else sum(sizes))
    return Sequences([s.cache for s in sources], mixture, capacity, endless=endless, unit_size=unit_size)
