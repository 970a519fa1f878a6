"""Building a token cache: all cores, a progress report, in the foreground or behind a running training."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from stoker.data import formats
from stoker.data.cache import ShardWriter, TokenCache, cache_key, lock, write_json
from stoker.data.readers import decode
from stoker.data.record import Raw, Rejected
from stoker.data.sources import Source, cache_folder
from stoker.data.tokenise import Batch, RowSettings, TextCodec, tokenise
from stoker.errors import UserError

CHUNK_ROWS = 512
SMALL = 4 << 20  # bytes: below, starting worker processes takes longer than the tokenising
LOOKED_AT = 200  # rows read to find the format

Report = Callable[[str, int, int], None]
"""Called with (source, rows read, tokens written) as a build goes on."""


def find_format(source: Source, columns: Mapping[str, str]) -> str:
    """The format of a source, from its first sound rows.

    Raises:
        UserError: when there is no sound row, or the columns fit no format.
    """
    values, rejected = [], []
    for raw in islice(source.rows(), LOOKED_AT):
        value = decode(raw) if isinstance(raw, Raw) else raw
        (rejected if isinstance(value, Rejected) else values).append(value)
    if not values:
        first = f"; the first row: {rejected[0].reason}" if rejected else ""
        raise UserError(f"{source.name} holds no readable row{first}")
    return formats.detect([v for v in values if not isinstance(v, Rejected)], columns)


_worker_codec: TextCodec
_worker_settings: RowSettings


def _start_worker(codec: TextCodec, settings: RowSettings) -> None:
    global _worker_codec, _worker_settings  # noqa: PLW0603 - a worker process is set up once
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_codec, _worker_settings = codec, settings


def _work(chunk: list[Raw | Rejected]) -> Batch:
    return tokenise(chunk, _worker_codec, _worker_settings)


def _chunks(rows: Iterable[Raw | Rejected]) -> Iterator[list[Raw | Rejected]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, CHUNK_ROWS)):
        yield chunk


def _batches(source: Source, skip: int, codec: TextCodec, settings: RowSettings, workers: int) -> Iterator[Batch]:
    chunks = _chunks(islice(source.rows(), skip, None))
    if workers == 1 or source.size_bytes < SMALL:
        for chunk in chunks:
            yield tokenise(chunk, codec, settings)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (codec, settings)) as pool:
        waiting: deque[Future[Batch]] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_work, chunk))
                if len(waiting) > 3 * workers:  # bounds what is held in memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _build(
    folder: Path, source: Source, codec: TextCodec, settings: RowSettings, report: Report | None, stop: threading.Event
) -> None:
    with lock(folder):
        if (folder / "complete.json").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        done = TokenCache(folder)  # whole shards of a build that was killed
        read, tokens = sum(s.rows_in for s in done.summaries), sum(s.tokens for s in done.summaries)
        writer = ShardWriter(folder, codec.vocabulary, len(done.summaries))
        for batch in _batches(source, read, codec, settings, available_cores()):
            if stop.is_set():
                return
            writer.add(batch)
            read += batch.rows_in
            tokens += sum(len(row.ids) for row in batch.rows)
            if report:
                report(source.name, read, tokens)
        writer.flush()
        write_json(folder / "complete.json", {"rows_in": read, "tokens": tokens, "format": settings.format})


def cache_path(source: Source, codec: TextCodec, settings: RowSettings) -> Path:
    """Where the cache of a source lies."""
    return cache_folder() / "tokens" / cache_key(source.fingerprint(), codec, settings)


def open_cache(source: Source, codec: TextCodec, settings: RowSettings, report: Report | None = None) -> TokenCache:
    """The cache of a source, built first where it is not there."""
    folder = cache_path(source, codec, settings)
    if not (folder / "complete.json").exists():
        _build(folder, source, codec, settings, report, threading.Event())
    return TokenCache(folder)


def open_stream(source: Source, codec: TextCodec, settings: RowSettings, report: Report | None = None) -> TokenCache:
    """The cache of a source while it is being built: returns once the first shard can be read."""
    folder = cache_path(source, codec, settings)
    if (folder / "complete.json").exists():
        return TokenCache(folder)
    errors: list[BaseException] = []
    stop = threading.Event()

    def body() -> None:
        try:
            _build(folder, source, codec, settings, report, stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="stoker-tokenise", daemon=True)
    thread.start()

    def close() -> None:
        stop.set()
        thread.join()

    cache = TokenCache(folder, lambda: errors[0] if errors else None, close)
    cache.wait_for(0)
    return cache
