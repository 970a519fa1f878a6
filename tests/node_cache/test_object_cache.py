"""One download a node: shared, taken without its origin and from full disks, and no secrets are kept."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from pathlib import Path

import pytest
from counting_origin import CountingOrigin
from object_downloads import MIB, fetched, random_bytes, started

from stoker.errors import Problem, RunFailed, UserError
from stoker.node_cache import object_cache, run_start
from stoker.node_cache import origin as origin_store
from stoker.node_cache.cache_stats import HERE
from stoker.node_cache.file_locks import lock_file
from stoker.node_cache.object_cache import NodeCache, RemoteObject
from stoker.node_cache.object_version import ObjectVersion
from stoker.node_cache.origin import OriginStore
from stoker.node_cache.remote_file import RemoteFile


def test_the_second_time_nothing_is_moved(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(3 * MIB)
    before = HERE.counts
    assert fetched(cache, f"{origin.url}/x") == data
    assert fetched(cache, f"{origin.url}/x") == data
    assert origin.sent == {"x": len(data)} and origin.asked("GET", "x") == 1
    now = HERE.counts - before
    assert (now.misses, now.hits, now.origin_bytes) == (1, 0, len(data))


def test_content_without_a_version_is_that_of_this_run(
    origin: CountingOrigin, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_another_run() -> None:
        time.sleep(0.05)  # a file's time may be some milliseconds early
        run_start.set_run_start(time.time() - 0.02)

    url, origin.tags["x"] = f"{origin.url}/x", ""
    monkeypatch.setattr(object_cache, "FRESH", -1.0)
    monkeypatch.setattr(run_start, "_STARTS", [0.0])
    for number, data in enumerate((b"old", b"new"), 1):
        start_another_run()
        origin.objects["x"] = data
        assert RemoteFile(cache.version(url)).identity == ""
        assert fetched(cache, url) == fetched(cache, url) == data
        assert origin.asked("GET", "x") == number
    start_another_run()
    _, pin = cache.fetch(RemoteObject(url, ObjectVersion(3)))
    origin.objects["x"] = b"now"
    assert fetched(cache, url) == b"new"  # it is in use
    pin.close()
    monkeypatch.setattr(OriginStore, "version", _unreachable)
    assert fetched(cache, url) == b"new"


def _unreachable(origin: OriginStore, url: str) -> ObjectVersion:
    raise RunFailed(Problem("the origin does not answer"))


def test_four_processes_that_start_cold_move_the_object_once(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(8 * MIB)
    origin.rate = 16 * MIB
    processes = [started(f"{origin.url}/x") for _ in range(4)]
    digests = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert digests == {hashlib.sha256(data).hexdigest()}
    assert origin.sent == {"x": len(data)} and origin.asked("GET", "x") == 1


def test_an_origin_that_is_down_leaves_what_is_here(
    cache: NodeCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose data is here starts again without its origin."""
    monkeypatch.setattr(object_cache, "FRESH", -1.0)
    with CountingOrigin({"x": b"1" * 1000}) as origin:
        url = f"{origin.url}/x"
        assert fetched(cache, url) == b"1" * 1000
    assert fetched(cache, url) == b"1" * 1000
    assert "what it said before is taken" in capsys.readouterr().err
    with pytest.raises(RunFailed, match="cannot be reached"):
        fetched(cache, f"{url}y")


def test_new_content_is_another_object(origin: CountingOrigin, cache: NodeCache) -> None:
    for text in (b"one" * 1000, b"two" * 1000):
        origin.objects["x"] = text
        time.sleep(0.01)
        found = cache.version(f"{origin.url}/x?{len(origin.requests)}")  # another URL is asked for anew
        path, pin = cache.fetch(found)
        with pin:
            assert path.read_bytes() == text
    assert len(list(cache.entries())) == 2


def test_an_empty_object(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = b""
    assert fetched(cache, f"{origin.url}/x") == b""


@pytest.mark.parametrize(
    ("asked", "urls"),
    [
        ("https://me:pw@h/x?sig=1", ["https://me:pw@h/x?sig=1"]),
        ("https://h/{0..1}?sig=1", ["https://h/0?sig=1", "https://h/1?sig=1"]),
        ("https://me:pw@h/*.jsonl", ["https://me:pw@h/a.jsonl", "https://me:pw@h/b.jsonl"]),
        ("s3://b/d", ["s3://b/d/c#.jsonl", "s3://b/d/c?.jsonl"]),
        ("abfs://container@account/d/", ["abfs://container@account/d/x"]),
        ("sftp://me:pw@h/d/", ["sftp://me:pw@h/d/x", "sftp://me:pw@h/d/y"]),
    ],
)
def test_processes_that_share_an_answer_ask_for_the_same_urls(asked: str, urls: list[str], cache: NodeCache) -> None:
    answer = [object_cache.RemoteObject(url, object_cache.ObjectVersion(1, "tag 1")) for url in urls]
    assert cache.answer("a question", asked, lambda: answer) == answer
    assert cache.answer("a question", asked, lambda: []) == answer
    assert not any(b"pw" in memo.read_bytes() for memo in (cache.root / "answers").iterdir())


def test_an_answer_with_signatures_of_a_page_is_not_shared(cache: NodeCache) -> None:
    answer = [object_cache.RemoteObject("https://h/a.jsonl?sig=1", object_cache.ObjectVersion(1, "tag 1"))]
    assert cache.answer("a question", "https://h/*.jsonl", lambda: answer) == answer
    assert cache.answer("a question", "https://h/*.jsonl", list) == []


def test_what_is_not_there(origin: CountingOrigin, cache: NodeCache) -> None:
    with pytest.raises(UserError, match=f"there is no object {origin.url}/gone"):
        cache.find(f"{origin.url}/gone.jsonl")
    origin.objects["there"] = b"1"
    with pytest.raises(RunFailed, match="cannot be reached"):
        cache.find("http://127.0.0.1:9/x")


def test_a_disk_that_cannot_be_written(origin: CountingOrigin, cache: NodeCache) -> None:
    cache.root.parent.mkdir(parents=True)
    cache.root.write_text("")
    with pytest.raises(RunFailed, match="the cache cannot be written"):
        cache.find(f"{origin.url}/x")


def test_secrets_of_a_url_are_not_kept(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = b"1"
    fetched(cache, f"{origin.url}/x?signature=geheim")
    assert not any(b"geheim" in path.read_bytes() for path in cache.root.rglob("*") if path.is_file())


def test_a_new_signature_downloads_nothing_again(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = b"1" * 1000
    assert {fetched(cache, f"{origin.url}/x?token={number}") for number in range(3)} == {b"1" * 1000}
    assert origin.asked("GET", "x") == 1


@pytest.mark.parametrize("fails", ["lock_file", "replace_file"])
def test_a_full_disk_does_not_fail_a_run_whose_objects_are_here(
    origin: CountingOrigin, cache: NodeCache, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    origin.objects["x"] = data = random_bytes(1000)
    assert fetched(cache, f"{origin.url}/x") == data
    monkeypatch.setattr(object_cache, "FRESH", -1.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(object_cache, fails, full)
    assert cache.version(f"{origin.url}/x").url == f"{origin.url}/x"
    monkeypatch.setattr(OriginStore, "version", _unreachable)
    assert fetched(cache, f"{origin.url}/x") == data


def test_a_read_only_disk_does_not_fail_a_run_whose_objects_are_here(
    origin: CountingOrigin, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.objects["x"] = data = random_bytes(1000)
    assert fetched(cache, f"{origin.url}/x") == data
    monkeypatch.setattr(object_cache, "FRESH", -1.0)
    opened = os.open

    def read_only(path: str | Path, flags: int, *args: int) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *args)

    def refuses(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(object_cache, "replace_file", refuses)
    assert fetched(cache, f"{origin.url}/x") == data
    monkeypatch.setattr(OriginStore, "version", _unreachable)
    assert fetched(cache, f"{origin.url}/x") == data
    with pytest.raises(RunFailed, match="the cache cannot be written: Read-only file system"):
        cache.fetch(RemoteObject(f"{origin.url}/y", ObjectVersion(1)))


def test_content_with_a_version_is_kept_for_later_runs(
    origin: CountingOrigin, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "FRESH", -1.0)
    origin.objects["x"] = b"1" * 1000
    assert fetched(cache, f"{origin.url}/x") == b"1" * 1000
    monkeypatch.setattr(run_start, "_STARTS", [time.time() + 60])
    assert fetched(cache, f"{origin.url}/x") == b"1" * 1000
    assert origin.asked("GET", "x") == 1


def test_a_download_of_an_object_that_is_here_does_not_begin(origin: CountingOrigin, cache: NodeCache) -> None:
    """Another process has completed it after this one looked."""
    origin.objects["x"] = b"1"
    found = cache.version(f"{origin.url}/x")
    _, pin = cache.fetch(found)
    with pin:
        assert cache.begin(found, cache.entry(found)) is None
        lock = cache.entry(found).lock()
        assert lock is not None
        lock.close()


def test_only_this_user_may_read_the_cache(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = b"1"
    before = os.umask(0)
    try:
        fetched(cache, f"{origin.url}/x")
    finally:
        os.umask(before)
    folders = [path for path in cache.root.rglob("*") if path.is_dir()]
    locks = [path for path in cache.root.rglob("*") if path.name in ("use", "lock")]
    assert len(folders) == 3 and len(locks) == 2
    assert not any(path.stat().st_mode & 0o077 for path in (*folders, *locks))


def test_a_lock_is_no_link_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        lock_file(tmp_path / "lock")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("status", [401, 403, 407])
def test_a_refusal_of_an_origin_is_not_asked_again(status: int, cache: NodeCache) -> None:
    asked = list[str]()

    class Refused(Exception):
        def __init__(self) -> None:
            self.status = status

    def ask() -> None:
        asked.append("asked")
        raise Refused

    with pytest.raises(UserError, match="https://h/x may not be read"):
        OriginStore("https://h/x")._asked("https://h/x", ask)
    assert len(asked) == 1


def test_a_part_that_is_too_short_is_not_joined_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    store, data = OriginStore("memory://b/x"), b"abcdefgh"
    monkeypatch.setattr(origin_store, "PIECE", 4)

    def cut(path: str, *, start: int, end: int) -> bytes:
        return data[start : min(end, 7 if end == 8 else 3)]

    monkeypatch.setattr(store._system, "cat_file", cut)
    pieces = store.pieces("memory://b/x", ObjectVersion(8), 0)
    with pytest.raises(OSError, match="3 bytes came where 4 were asked for"):
        list(pieces)
