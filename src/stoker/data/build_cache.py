"""Builds a token cache on all cores, in the foreground or in the background of a training run."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from stoker.data.files.cache_lock import BuildStopped, lock
from stoker.data.files.readers import decode
from stoker.data.files.row_batch import EncodedBatch
from stoker.data.files.rows import Raw, Rejected
from stoker.data.formats.all_formats import RowUse
from stoker.data.formats.detect_format import detect
from stoker.data.formats.prompt_groups import SCORED, group_by_prompt, skip_rows
from stoker.data.sources import Source, empty_source
from stoker.data.splits import ALL_ROWS
from stoker.data.text_codec import TextCodec
from stoker.data.token_cache import TokenCache, cache_key
from stoker.data.token_shards import ShardWriter
from stoker.data.tokenise import RowSettings, tokenise
from stoker.errors import Problem, RunFailed, UserError
from stoker.files import write_json
from stoker.hardware.cache_folder import cache_folder
from stoker.hardware.process.blocked_signals import blocked_signals
from stoker.hardware.process.parent_process import end_with
from stoker.hardware.processor import available_cores
from stoker.node_cache.download import ObjectChanged

CHUNK_ROWS = 512
CHUNK_BYTES = 4 << 20  # a chunk of long rows ends earlier
SMALL = 8 << 20  # bytes: below, starting worker processes takes longer than the tokenising
LOOKED_AT = 200  # sound rows read to find the format
UNREADABLE = "unreadable"  # the format of a source without a sound row

Report = Callable[[str, int, int, float | None], None]
"""Called with (source, rows read, tokens written, share of the source read) during a build; the share is None if it
is unknown before the end (compressed files, columns)."""


def find_format(source: Source, columns: Mapping[str, str], use: RowUse = "answers") -> str:
    """Returns the format of a source, from its first valid rows; `UNREADABLE` if every row is broken.

    Raises:
        UserError: when there is no row at all, or the columns fit no format.
    """
    values: list[dict[str, Any] | str] = []
    rows = 0
    for raw in source.rows():
        rows += 1
        value = decode(raw) if isinstance(raw, Raw) else raw
        if not isinstance(value, Rejected):
            values.append(value)
            if len(values) == LOOKED_AT:
                break
    if not rows:
        raise UserError(Problem(*empty_source(source.name)))
    if not values:
        return UNREADABLE
    try:
        return detect(values, columns, use)
    except UserError as error:
        raise UserError(
            *(replace(problem, message=f"{source.name}: {problem.message}") for problem in error.problems)
        ) from error


_worker_codec: TextCodec
_worker_settings: RowSettings


def _start_worker(codec: TextCodec, settings: RowSettings, parent: int) -> None:
    global _worker_codec, _worker_settings  # a worker process is set up once
    end_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    _worker_codec, _worker_settings = codec, settings


def _work(chunk: list[Raw | Rejected]) -> EncodedBatch:
    return tokenise(chunk, _worker_codec, _worker_settings)


def _chunks(rows: Iterable[Raw | Rejected]) -> Iterator[list[Raw | Rejected]]:
    """Yields rows in groups that depend only on the rows: shards end where a group ends."""
    chunk: list[Raw | Rejected] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += _size(row)
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _size(row: Raw | Rejected) -> int:
    if isinstance(row, Rejected):
        return 0
    columns = row.value.values() if isinstance(row.value, dict) else (row.value,)
    values = [part for value in columns for part in (value if isinstance(value, list) else (value,))]
    return sum(len(value) for value in values if isinstance(value, str | bytes))


@dataclass
class _Meter:
    """The share of a source that has been read: ``total`` is its bytes, None if they are not the rows' own.

    Counting raises `BuildStopped` once ``stop`` is set.
    """

    total: int | None
    stop: threading.Event | None
    read: int = 0

    @property
    def share(self) -> float | None:
        return min(1.0, self.read / self.total) if self.total else None

    def count(self, rows: Iterable[Raw | Rejected]) -> Iterator[Raw | Rejected]:
        for row in rows:
            if self.stop is not None and self.stop.is_set():
                raise BuildStopped
            self.read += _size(row) + 1  # and its line feed
            yield row


def _holds_its_rows(source: Source) -> bool:
    """Returns whether the files' bytes are all rows: plain lines, all of them used."""
    plain = all(file.suffix in (".jsonl", ".ndjson", ".txt", ".md") for file in source.files)
    return plain and not source.corpus and source.part == ALL_ROWS


def _batches(
    source: Source, rows: Iterator[Raw | Rejected], codec: TextCodec, settings: RowSettings, workers: int
) -> Iterator[EncodedBatch]:
    """Yields the batches of rows in order, tokenised by ``workers`` processes; small sources by this one."""
    chunks = _chunks(rows)
    if workers == 1 or source.size_bytes < SMALL:
        for chunk in chunks:
            yield tokenise(chunk, codec, settings)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (codec, settings, os.getpid())) as pool:
        waiting: deque[Future[EncodedBatch]] = deque()
        try:
            for chunk in chunks:
                with blocked_signals([signal.SIGINT]):  # Ctrl-C goes to it too, and its imports would print a traceback
                    waiting.append(pool.submit(_work, chunk))
                while waiting and (waiting[0].done() or len(waiting) > 4 * workers):  # bounds the memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _build(
    folder: Path,
    source: Source,
    codec: TextCodec,
    settings: RowSettings,
    *,
    report: Report | None,
    stop: threading.Event | None = None,
) -> None:
    """Builds the cache in ``folder``; behind a running training where there is an event to stop it by."""
    try:
        with lock(folder, stop):
            if (folder / "complete.json").exists():
                return
            folder.mkdir(parents=True, exist_ok=True)
            done = TokenCache(folder)  # whole shards of a build that was killed
            read, tokens = sum(s.rows_in for s in done.summaries), sum(s.tokens for s in done.summaries)
            writer = ShardWriter(folder, codec.vocabulary, len(done.summaries), source.root)
            meter = _Meter(source.size_bytes if _holds_its_rows(source) else None, stop)
            rows = meter.count(source.rows())
            if settings.format == SCORED:
                rows = skip_rows(group_by_prompt(rows, dict(settings.columns)), read)
            else:
                rows = islice(rows, read, None)
            for batch in _batches(source, rows, codec, settings, available_cores()):
                if stop is not None and stop.is_set():
                    return
                writer.add(batch)
                read += batch.rows_in
                tokens += len(batch.ids)
                if report:
                    report(source.name, read, tokens, meter.share)
            writer.flush()
            write_json(folder / "complete.json", {"rows_in": read, "tokens": tokens, "format": settings.format})
    except BuildStopped:
        return
    except ObjectChanged:  # shards of bytes that no longer count
        for path in folder.glob("shard-*"):
            path.unlink(missing_ok=True)
        raise
    except OSError as error:
        advice = "free some space, or set STOKER_CACHE to another folder"
        raise RunFailed(
            Problem(f"the token cache cannot be written: {error.strerror or error}", advice, file=str(folder))
        ) from error
    except BrokenExecutor as error:
        message = f"{source.name}: a tokenising process was killed, perhaps for lack of memory"
        raise RunFailed(Problem(message, "run the same command again: it continues from there")) from error


def cache_path(source: Source, codec: TextCodec, settings: RowSettings) -> Path:
    """Returns the folder of a source's cache."""
    return cache_folder() / "tokens" / cache_key(source.fingerprint(), codec, settings)


def open_cache(source: Source, codec: TextCodec, settings: RowSettings, report: Report | None = None) -> TokenCache:
    """Returns the cache of a source, and builds it first if it is missing."""
    folder = cache_path(source, codec, settings)
    if not (folder / "complete.json").exists():
        _build(folder, source, codec, settings, report=report)
    return TokenCache(folder, root=source.root)


def open_stream(source: Source, codec: TextCodec, settings: RowSettings, report: Report | None = None) -> TokenCache:
    """Returns the cache of a source while it is being built: returns once the first shard can be read."""
    folder = cache_path(source, codec, settings)
    if (folder / "complete.json").exists():
        return TokenCache(folder, root=source.root)
    errors: list[BaseException] = []
    stop = threading.Event()

    def body() -> None:
        try:
            _build(folder, source, codec, settings, report=report, stop=stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="stoker-tokenise", daemon=True)
    thread.start()

    def close() -> None:
        stop.set()
        thread.join()

    cache = TokenCache(folder, lambda: errors[0] if errors else None, close, source.root)
    cache.wait_for(0)
    return cache
