"""Token caches: the same bytes however they were built, built once, and gone on with after a kill."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenised import sequences_of

from stoker.data import build_cache, token_cache, token_shards
from stoker.data.build_cache import cache_path, find_format, open_cache, open_stream
from stoker.data.files.rows import Raw, Rejected
from stoker.data.sources import Source, open_source
from stoker.data.text_codec import TextCodec
from stoker.data.token_cache import TokenCache, cache_key
from stoker.data.token_shards import ShardWriter
from stoker.data.tokenise import RowSettings, tokenise
from stoker.errors import RunFailed, UserError
from stoker.job.blocks.source_block import SourceBlock

SETTINGS = RowSettings("messages", (), "all", "cut", 128)


def write(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for i in range(rows):
            if i % 50 == 7:
                file.write("{broken\n")
                continue
            turns = [
                {"role": "user", "content": f"Where is {i}?"},
                {"role": "assistant", "content": "There. " * (i % 9 + 1)},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """600 rows in shards of 64, in a cache folder of the test's own."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_shards, "SHARD_ROWS", 64)
    monkeypatch.setattr(build_cache, "CHUNK_ROWS", 32)
    write(tmp_path / "my.jsonl", 600)
    return open_source(SourceBlock(path="my.jsonl"), tmp_path)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def test_tokens_have_the_smallest_type_that_takes_the_largest_id(tmp_path: Path) -> None:
    assert [ShardWriter(tmp_path, size, 0).dtype for size in (1 << 16, (1 << 16) + 1)] == [np.uint16, np.uint32]


def test_a_cache_holds_what_tokenising_gives(source: Source, chatml: TextCodec) -> None:
    reports: list[tuple[str, int, int, float | None]] = []
    built = open_cache(source, chatml, SETTINGS, lambda *report: reports.append(report))
    batch = tokenise(list(source.rows()), chatml, SETTINGS)
    assert built.complete
    assert len(built.summaries) > 4
    assert built.rows == len(sequences_of(batch)) == 588
    for i, row in enumerate(sequences_of(batch)):
        assert np.array_equal(built[i].ids, row.ids)
        assert np.array_equal(built[i].trained, row.trained)
        assert built.lengths(np.array([i])).tolist() == [len(row.ids)]
        assert built.origin(i) == (row.source, row.row)
    assert built.column("digest").tolist() == [row.digest for row in sequences_of(batch)]
    assert built.column("trained").tolist() == [int(row.trained[1:].sum()) for row in sequences_of(batch)]
    picked = np.array([0, 587, 63, 64, 65, 300, 0])
    assert built.lengths(picked).tolist() == [len(built[int(i)].ids) for i in picked]
    assert [d for s in built.summaries for d in s.dropped] == batch.dropped
    assert sum(s.rows_in for s in built.summaries) == 600
    *counts, share = reports[-1]
    assert counts == [source.name, 600, len(batch.ids)]
    assert share is not None and 0.9 < share <= 1.0
    with pytest.raises(IndexError):
        built[588]


def test_a_second_look_builds_nothing(source: Source, chatml: TextCodec) -> None:
    open_cache(source, chatml, SETTINGS)
    again = open_cache(source, chatml, SETTINGS, lambda *report: pytest.fail(f"built again: {report}"))
    assert again.rows == 588


def test_rows_of_a_copied_source_are_named_by_the_copy(source: Source, chatml: TextCodec, tmp_path: Path) -> None:
    """The same file elsewhere has the same cache; the first one may be gone."""
    first = open_cache(source, chatml, SETTINGS)
    (tmp_path / "copied").mkdir()
    (tmp_path / "my.jsonl").rename(tmp_path / "copied" / "my.jsonl")
    copied = open_source(SourceBlock(path="my.jsonl"), tmp_path / "copied")
    for again in (open_cache(copied, chatml, SETTINGS), open_stream(copied, chatml, SETTINGS)):
        assert again.folder == first.folder
        assert again.origin(0) == (str(tmp_path / "copied" / "my.jsonl"), 1)
        assert {d.source for s in again.summaries for d in s.dropped} == {str(tmp_path / "copied" / "my.jsonl")}
    assert first.origin(0) == (str(tmp_path / "my.jsonl"), 1)


def test_ids_above_16_bits_are_kept(source: Source, chatml: TextCodec) -> None:
    wide = open_cache(source, replace(chatml, vocabulary=1 << 17), SETTINGS)
    narrow = TokenCache(open_cache(source, chatml, replace(SETTINGS, seq_len=129)).folder)
    assert wide[0].ids.dtype == np.uint32
    assert narrow[0].ids.dtype == np.uint16
    assert np.array_equal(wide[500].ids, narrow[500].ids)


def test_the_key_changes_with_all_that_decides_tokens(chatml: TextCodec) -> None:
    keys = {
        cache_key("a", chatml, SETTINGS),
        cache_key("b", chatml, SETTINGS),
        cache_key("a", replace(chatml, end_id=0), SETTINGS),
        cache_key("a", replace(chatml, stop_ids=frozenset({0})), SETTINGS),
        cache_key("a", chatml.for_source(SourceBlock(path="a", template="plain"), Path()), SETTINGS),
        cache_key("a", chatml, replace(SETTINGS, seq_len=64)),
        cache_key("a", chatml, replace(SETTINGS, train_on="last")),
        cache_key("a", chatml, replace(SETTINGS, too_long="drop")),
        cache_key("a", chatml, replace(SETTINGS, columns=(("messages", "turns"),))),
    }
    assert len(keys) == 9


@pytest.mark.parametrize("behind", [False, True])
def test_two_processes_write_the_bytes_of_one(
    source: Source, chatml: TextCodec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, behind: bool
) -> None:
    monkeypatch.setattr(build_cache, "available_cores", lambda: 1)
    one = open_cache(source, chatml, SETTINGS)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(build_cache, "available_cores", lambda: 2)
    monkeypatch.setattr(build_cache, "SMALL", 0)
    two = (open_stream if behind else open_cache)(source, chatml, SETTINGS)
    assert two.rows == one.rows
    two.close()
    assert one.folder != two.folder
    assert files_of(one.folder) == files_of(two.folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupt_does_not_reach_processes_that_start(source: Source, chatml: TextCodec) -> None:
    """Ctrl-C in a terminal is sent to them too: during their imports each would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    batches = build_cache._batches(replace(source, size_bytes=build_cache.SMALL), source.rows(), chatml, SETTINGS, 2)
    earlier = {child.pid for child in psutil.Process().children()}
    next(batches)
    workers = [c for c in psutil.Process().children() if c.pid not in earlier and "spawn_main" in " ".join(c.cmdline())]
    blocked = [re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{child.pid}/status").read_text()) for child in workers]
    assert workers and all(int(found[1], 16) >> (signal.SIGINT - 1) & 1 for found in blocked if found)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    batches.close()


BUILDER = """
import pickle, sys, time
from stoker.data import build_cache
from stoker.data import token_shards
token_shards.SHARD_ROWS, build_cache.CHUNK_ROWS = 64, 32
source, codec, settings, pause = pickle.load(open(sys.argv[1], "rb"))
def report(name, rows, tokens, *_):
    print(rows, flush=True)
    time.sleep(pause)
print("rows:", build_cache.open_cache(source, codec, settings, report).rows, flush=True)
"""


def start_builder(tmp_path: Path, source: Source, codec: TextCodec, pause: float) -> subprocess.Popen[str]:
    (tmp_path / "builder.pickle").write_bytes(pickle.dumps((source, codec, SETTINGS, pause)))
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "builder.pickle")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)


def test_of_two_processes_that_want_a_cache_one_builds_it(source: Source, chatml: TextCodec, tmp_path: Path) -> None:
    processes = [start_builder(tmp_path, source, chatml, 0.02) for _ in range(2)]
    said = sorted((process.communicate(timeout=60)[0].split("\n") for process in processes), key=len)
    assert [process.returncode for process in processes] == [0, 0]
    assert said[0] == ["rows: 588", ""]
    assert [int(line) for line in said[1][:-2]] == [*range(32, 600, 32), 600]


def test_a_killed_build_goes_on_behind_its_whole_shards(source: Source, chatml: TextCodec, tmp_path: Path) -> None:
    process = start_builder(tmp_path, source, chatml, 0.1)
    folder = cache_path(source, chatml, SETTINGS)
    until = time.monotonic() + 60
    while not (folder / "shard-00001.json").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-0000[01]*")}
    assert not (folder / "complete.json").exists()
    (folder / "shard-00009.tokens").write_bytes(b"half a shard")
    reports: list[int] = []
    built = open_cache(source, chatml, SETTINGS, lambda name, rows, *_: reports.append(rows))
    assert reports[0] > 100  # the first shards' rows were not read again
    assert reports[-1] == 600
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-0000[01]*")} == kept
    assert built.rows == 588
    batch = tokenise(list(source.rows()), chatml, SETTINGS)
    assert built.column("digest").tolist() == [row.digest for row in sequences_of(batch)]


@dataclass(frozen=True)
class Slow(Source):
    """A source whose rows after the 300th come only when a gate is opened."""

    gate: threading.Event = threading.Event()  # noqa: RUF009 - one test uses it

    def rows(self) -> Iterator[Raw | Rejected]:
        for number, row in enumerate(super().rows()):
            if number == 300:
                assert self.gate.wait(60)
            yield row


def slow(source: Source) -> Slow:
    return Slow(source.name, source.files, source.size_bytes, source.root, gate=threading.Event())


def test_a_stream_can_be_read_before_its_source_is_tokenised(source: Source, chatml: TextCodec) -> None:
    late = slow(source)
    stream = open_stream(late, chatml, SETTINGS)
    assert not stream.complete
    assert 64 <= stream.ready < 300
    early = stream[10].ids.copy()
    late.gate.set()
    assert stream.wait_for(400)
    assert not stream.wait_for(588)
    assert stream.rows == 588
    assert np.array_equal(stream[10].ids, early)
    stream.close()
    whole = open_stream(source, chatml, SETTINGS)
    assert whole.complete
    assert whole.column("digest").tolist() == stream.column("digest").tolist()


def test_closing_ends_a_build_and_keeps_its_shards(source: Source, chatml: TextCodec) -> None:
    late = slow(source)
    stream = open_stream(late, chatml, SETTINGS)
    threading.Timer(0.1, late.gate.set).start()
    stream.close()
    assert not stream.complete
    assert open_cache(source, chatml, SETTINGS).rows == 588


class Counted(Source):
    """A source that counts the rows that are read of it, and after the tenth waits for a gate."""

    read = 0
    gate = threading.Event()

    def rows(self) -> Iterator[Raw | Rejected]:
        for row in super().rows():
            Counted.read += 1
            yield row
            if Counted.read == 10:
                assert Counted.gate.wait(60)


def test_closing_ends_the_wait_for_another_build(source: Source, chatml: TextCodec) -> None:
    late = slow(source)
    builds = open_stream(late, chatml, SETTINGS)
    Counted.read = 0
    waits = open_stream(Counted(source.name, source.files, source.size_bytes, source.root), chatml, SETTINGS)
    closing = threading.Thread(target=waits.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    late.gate.set()
    builds.close()
    assert Counted.read == 0


def test_closing_ends_a_build_that_skips_rows_of_earlier_shards(source: Source, chatml: TextCodec) -> None:
    late = slow(source)
    stream = open_stream(late, chatml, SETTINGS)
    threading.Timer(0.1, late.gate.set).start()
    stream.close()
    shards = len(TokenCache(stream.folder).summaries)
    Counted.read = 0
    again = open_stream(Counted(source.name, source.files, source.size_bytes, source.root), chatml, SETTINGS)
    threading.Timer(0.1, Counted.gate.set).start()
    again.close()
    assert Counted.read <= 11  # of 64 and more that the shards hold
    assert not again.complete
    assert len(TokenCache(stream.folder).summaries) == shards


def test_what_fails_behind_is_raised_in_front(source: Source, chatml: TextCodec) -> None:
    class Failing(Source):
        def rows(self) -> Iterator[Raw | Rejected]:
            yield from list(super().rows())[:100]
            raise UserError("my.jsonl: the disk is gone")

    failing = Failing(source.name, source.files, source.size_bytes, source.root)
    stream = open_stream(failing, chatml, SETTINGS)
    with pytest.raises(UserError, match="the disk is gone"):
        _ = stream.rows


def test_a_cache_that_cannot_be_written_is_said(
    source: Source, chatml: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = token_shards._write
    monkeypatch.setattr(token_shards, "_write", lambda _, values: write(Path("/dev/full"), values))
    with pytest.raises(RunFailed, match=r"the token cache cannot be written: No space left.*free some space"):
        open_cache(source, chatml, SETTINGS)


def test_a_source_without_a_single_sequence_has_an_empty_cache(tmp_path: Path, chatml: TextCodec) -> None:
    (tmp_path / "bad.jsonl").write_text("{broken\n" * 3)
    bad = open_source(SourceBlock(path="bad.jsonl"), tmp_path)
    assert find_format(bad, {}) == build_cache.UNREADABLE
    empty = open_cache(bad, chatml, replace(SETTINGS, format=build_cache.UNREADABLE))
    assert empty.rows == 0
    assert [d.row for d in empty.summaries[0].dropped] == [1, 2, 3]
    assert empty.column("length").shape == (0,)


def test_the_format_is_found_behind_broken_rows(tmp_path: Path) -> None:
    (tmp_path / "late.jsonl").write_text("{broken\n" * 500 + '{"instruction": "a", "output": "b"}\n')
    assert find_format(open_source(SourceBlock(path="late.jsonl"), tmp_path), {}) == "instruction"
    (tmp_path / "none.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"none.jsonl is empty"):
        find_format(open_source(SourceBlock(path="none.jsonl"), tmp_path), {})
    (tmp_path / "odd.jsonl").write_text('{"colour": "red"}\n')
    with pytest.raises(UserError, match=r"odd.jsonl: the columns 'colour' fit no known format"):
        find_format(open_source(SourceBlock(path="odd.jsonl"), tmp_path), {})


def test_long_rows_are_tokenised_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cache, "CHUNK_BYTES", 1000)
    rows: list[Raw | Rejected] = [Raw("f", i, b"x" * 400) for i in range(7)]
    rows += [Rejected("f", 8, "bad"), Raw("f", 9, {"text": "y" * 2000, "n": 3}), Raw("f", 10, {"text": "z"})]
    assert [len(chunk) for chunk in build_cache._chunks(rows)] == [3, 3, 3, 1]


def test_a_shard_that_was_unmapped_is_mapped_again(
    source: Source, chatml: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_cache(source, chatml, SETTINGS).folder
    caches = TokenCache(folder), TokenCache(folder)
    rows = [*range(0, 588, 40), *range(0, 588, 90)]
    whole = [caches[0][row].ids.tolist() for row in rows], caches[0].column("digest")
    monkeypatch.setattr(token_cache, "_mapped", lru_cache(maxsize=2)(token_cache._mapped.__wrapped__))
    token_cache._mapped.cache_clear()
    for few in caches:  # together they have two
        assert [few[row].ids.tolist() for row in rows] == whole[0]
        assert np.array_equal(few.column("digest"), whole[1])
    assert token_cache._mapped.cache_info().currsize == 2


READ_ALL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
from pathlib import Path
from stoker.data.token_cache import TokenCache
caches = [TokenCache(Path(sys.argv[1])) for _ in range(2)]
print(len(caches[0].summaries), *(int(cache.column("length").sum()) for cache in caches))
"""


def test_a_cache_of_more_shards_than_descriptors_is_read(
    source: Source, chatml: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_shards, "SHARD_ROWS", 8)
    monkeypatch.setattr(build_cache, "CHUNK_ROWS", 8)
    cache = open_cache(source, chatml, SETTINGS)
    found = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(cache.folder)], check=True, stdout=subprocess.PIPE, text=True
    )
    shards, *tokens = map(int, found.stdout.split())
    assert shards > 32 and tokens == [int(cache.column("length").sum())] * 2


def test_shards_end_where_nearly_all_rows_are_dropped(
    tmp_path: Path, chatml: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_shards, "SHARD_ROWS", 64)
    monkeypatch.setattr(build_cache, "CHUNK_ROWS", 32)
    (tmp_path / "bad.jsonl").write_text("{broken\n" * 300)
    bad = open_cache(open_source(SourceBlock(path="bad.jsonl"), tmp_path), chatml, SETTINGS)
    assert [len(summary.dropped) for summary in bad.summaries] == [64, 64, 64, 64, 44]
    assert [d.row for summary in bad.summaries for d in summary.dropped] == list(range(1, 301))
