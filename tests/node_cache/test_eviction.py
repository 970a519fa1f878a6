"""The limit of the cache: what was used least recently leaves, and what is in use never does."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from counting_origin import CountingOrigin

from stoker.errors import RunFailed
from stoker.node_cache import object_cache as caches
from stoker.node_cache.object_cache import NodeCache, RemoteObject
from stoker.node_cache.object_reader import ObjectReader
from stoker.node_cache.prefetch import Prefetch
from stoker.node_cache.remote_file import RemoteFile

MIB = 2**20


@pytest.fixture
def four(origin: CountingOrigin, cache: NodeCache, monkeypatch: pytest.MonkeyPatch) -> list[RemoteObject]:
    """Four objects of a MiB, a to d, and a limit of two and a half."""
    monkeypatch.setattr(caches, "COUNTED", 0.0)
    cache.set_limit(5 * MIB // 2)
    for name in "abcd":
        origin.objects[f"{name}.txt"] = name.encode() * MIB
    return [cache.version(f"{origin.url}/{name}.txt") for name in "abcd"]


def here(cache: NodeCache, four: list[RemoteObject]) -> str:
    return "".join(name for name, each in zip("abcd", four, strict=True) if cache.entry(each).is_whole)


def use(cache: NodeCache, found: RemoteObject, when: float) -> None:
    cache.fetch(found)[1].close()
    os.utime(cache.entry(found).folder / "use", (when, when))


def test_the_least_recently_used_leaves(cache: NodeCache, four: list[RemoteObject]) -> None:
    a, b, c, d = four
    use(cache, a, 1)
    use(cache, b, 2)
    use(cache, a, 3)
    use(cache, c, 4)
    assert here(cache, four) == "ac"
    use(cache, d, 5)
    assert here(cache, four) == "cd"
    assert cache.size() == 2 * MIB


def test_reading_an_object_again_keeps_it(cache: NodeCache, four: list[RemoteObject]) -> None:
    a, b, c, _ = four
    use(cache, a, 1)
    use(cache, b, 2)
    cache.fetch(a)[1].close()
    use(cache, c, time.time())
    assert here(cache, four) == "ac"


def test_what_was_downloaded_since_the_cache_was_counted_counts(origin: CountingOrigin, cache: NodeCache) -> None:
    cache.set_limit(5 * MIB // 2)
    for name in "abcd":
        origin.objects[name] = name.encode() * MIB
        cache.fetch(cache.version(f"{origin.url}/{name}"))[1].close()
    assert sum(entry.here() for entry in cache.entries()) == 2 * MIB


def test_what_is_in_use_stays_even_beyond_the_limit(cache: NodeCache, four: list[RemoteObject]) -> None:
    pins = [cache.fetch(each)[1] for each in four[:3]]
    assert here(cache, four) == "abc"
    pins[1].close()
    use(cache, four[3], time.time())
    assert here(cache, four) == "acd"
    for pin in pins:
        pin.close()


def test_a_reader_keeps_what_it_reads(origin: CountingOrigin, cache: NodeCache, four: list[RemoteObject]) -> None:
    with ObjectReader(cache, four[0]) as reader:
        start = reader.read(10)
        for each in four[1:]:
            use(cache, each, time.time())
        assert start + reader.read(2 * MIB) + reader.read(2 * MIB)[:0] == b"a" * (10 + MIB - 10)
    assert origin.sent["a.txt"] == MIB


def test_what_has_left_comes_again(origin: CountingOrigin, cache: NodeCache, four: list[RemoteObject]) -> None:
    for each in four:
        use(cache, each, time.time())
    path, pin = cache.fetch(four[0])
    with pin:
        assert path.read_bytes() == b"a" * MIB
    assert origin.sent["a.txt"] == 2 * MIB


def test_removal_and_use_at_the_same_time(cache: NodeCache, four: list[RemoteObject]) -> None:
    """Whoever has an object has it whole, whatever is removed meanwhile."""
    over, wrong = threading.Event(), []

    def remove() -> None:
        while not over.is_set():
            cache.shrink(0)

    remover = threading.Thread(target=remove)
    remover.start()
    for turn in range(40):
        path, pin = cache.fetch(four[turn % 4])
        with pin:
            if len(path.read_bytes()) != MIB:
                wrong.append(turn)
    over.set()
    remover.join()
    assert not wrong


def test_more_than_the_disk_has_is_refused_before_it_comes(
    origin: CountingOrigin, cache: NodeCache, four: list[RemoteObject], monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda _: usage(MIB, 0, MIB // 2))
    with pytest.raises(RunFailed, match="524,288 free"):
        cache.fetch(four[0])
    assert origin.total == 0
    assert not cache.entry(four[0]).in_use


def test_the_limit_is_half_of_what_the_disk_has_until_it_is_set(
    origin: CountingOrigin, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.objects["x"] = bytes(MIB)
    cache.fetch(cache.version(f"{origin.url}/x"))[1].close()
    monkeypatch.setattr(caches, "COUNTED", 0.0)
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * MIB))
    assert cache.limit == 2 * MIB
    cache.set_limit(1000)
    assert NodeCache(cache.root).limit == 1000
    cache.set_limit(None)
    assert cache.limit == 2 * MIB


def test_files_are_fetched_ahead_in_their_order(origin: CountingOrigin, cache: NodeCache) -> None:
    names = [f"{number:02d}" for number in (3, 1, 2, 0)]
    for name in names:
        origin.objects[name] = name.encode() * 1000
    files = [RemoteFile(cache.version(f"{origin.url}/{name}")) for name in names]
    turns = Prefetch(files).in_turn()
    first = next(turns)
    deadline = time.monotonic() + 20
    while not all(cache.entry(file.found).is_whole for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    asked = [name for method, name, _ in origin.requests if method == "GET"]
    assert sorted(asked) == sorted(names) and first is files[0]
    assert cache.shrink(0) == 0  # nothing leaves before it has been read
    assert [str(file) for file in turns] == [str(file) for file in files[1:]]
    freed = cache.shrink(0)
    while freed < 4 * 2000 and time.monotonic() < deadline:  # a thread may just be giving up the last one
        freed += cache.shrink(0)
    assert freed == 4 * 2000


def test_no_further_ahead_than_the_cache_can_hold(origin: CountingOrigin, cache: NodeCache, tmp_path: Path) -> None:
    cache.set_limit(8 * MIB)  # a quarter of it is fetched ahead
    for number in range(6):
        origin.objects[f"{number}"] = bytes(MIB)
    files = [RemoteFile(cache.version(f"{origin.url}/{number}")) for number in range(6)]
    turns = Prefetch(files).in_turn()
    for sent in (["0", "1"], ["0", "1", "2"]):
        next(turns)
        deadline = time.monotonic() + 20
        while sorted(origin.sent) != sent:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.5)
        assert sorted(origin.sent) == sent
    turns.close()
