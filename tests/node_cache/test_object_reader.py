"""Readers of an object: bytes are read while they come, and no more are downloaded than are read."""

from __future__ import annotations

import base64
import hashlib
import threading
import time

import pytest
from counting_origin import CountingOrigin
from object_downloads import MIB, fetched, left_part, random_bytes

from stoker.errors import RunFailed
from stoker.node_cache import object_reader
from stoker.node_cache.cache_stats import HERE
from stoker.node_cache.object_cache import NodeCache
from stoker.node_cache.object_reader import ObjectReader


def test_content_that_changes_in_the_middle_is_refused(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = random_bytes(2 * MIB, 1)
    found = cache.version(f"{origin.url}/x")
    origin.cut["x"] = MIB
    reader = ObjectReader(cache, found)
    assert reader.read(MIB // 2)
    origin.objects["x"] = random_bytes(2 * MIB, 2)
    with reader, pytest.raises(RunFailed, match="has changed while it was read"):
        while reader.read(MIB):
            pass
    assert not any(entry.is_whole for entry in cache.entries())


def test_readers_see_bytes_while_they_come(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(4 * MIB)
    origin.rate = 4 * MIB
    found = cache.version(f"{origin.url}/x")
    threading.Thread(target=fetched, args=(cache, found.url), daemon=True).start()
    with ObjectReader(cache, found) as reader:
        first = reader.read(1000)
        assert not cache.entry(found).is_whole
        rest = bytearray(first)
        while piece := reader.read(MIB):
            rest += piece
    assert rest == data and origin.asked("GET", "x") == 1


def test_the_time_in_which_a_reader_waits_for_bytes_is_counted(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = random_bytes(MIB)
    origin.rate = 2 * MIB
    found = cache.version(f"{origin.url}/x")
    before, began = HERE.counts, time.monotonic()
    with ObjectReader(cache, found) as reader:
        while reader.read(MIB):
            pass
    assert 0.25 < (HERE.counts - before).wait_seconds <= time.monotonic() - began
    before = HERE.counts
    with ObjectReader(cache, found) as reader:  # all is here: the reader's own time does not count
        assert len(reader.read(MIB)) == MIB
        time.sleep(0.5)
        assert reader.read(MIB) == b""
    assert (HERE.counts - before).wait_seconds < 0.4


def test_a_reader_downloads_no_more_than_it_reads(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = random_bytes(64 * MIB)
    with ObjectReader(cache, cache.version(f"{origin.url}/x")) as reader:
        assert reader.read(1000)
    time.sleep(0.2)
    assert origin.total < 24 * MIB  # what is on its way in buffers


def test_a_reader_that_pauses_does_not_stop_others(
    origin: CountingOrigin, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_reader, "IDLE", 0.1)
    origin.objects["x"] = data = random_bytes(24 * MIB)
    found = cache.version(f"{origin.url}/x")
    with ObjectReader(cache, found) as reader:
        first = reader.read(1000)
        until = time.monotonic() + 10
        cache.fetch(found, stop=lambda: time.monotonic() > until)[1].close()
        assert cache.entry(found).is_whole and first + b"".join(iter(lambda: reader.read(MIB), b"")) == data


def test_bytes_that_were_read_and_turn_out_to_be_damaged_are_an_error(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(2 * MIB)
    origin.headers["x"] = {"Content-MD5": base64.b64encode(hashlib.md5(data).digest()).decode()}
    found = cache.version(f"{origin.url}/x")
    entry = left_part(cache, found, b"z" * MIB)  # as a disk may have it after a power cut
    with ObjectReader(cache, found) as reader:
        assert reader.read(1000) == b"z" * 1000
        with pytest.raises(RunFailed, match="bytes that were read before they were checked were damaged"):
            while reader.read(MIB):
                pass
    assert not entry.in_use
    assert fetched(cache, found.url) == data
