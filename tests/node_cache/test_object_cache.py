"""One download a node: shared, resumed, checked; what does not fit is never kept."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from counting_origin import CountingOrigin

from stoker.errors import Problem, RunFailed, UserError
from stoker.node_cache import object_cache, object_reader, remote_folder, run_start
from stoker.node_cache.cache_stats import HERE
from stoker.node_cache.object_cache import NodeCache, RemoteObject
from stoker.node_cache.object_reader import ObjectReader
from stoker.node_cache.object_version import ObjectVersion
from stoker.node_cache.origin import OriginStore
from stoker.node_cache.remote_file import RemoteFile
from stoker.node_cache.remote_folder import local_path, with_weights

MIB = 2**20


def random_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def fetched(cache: NodeCache, url: str) -> bytes:
    path, pin = cache.fetch(cache.version(url))
    with pin:
        return path.read_bytes()


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


FETCH = """
import sys
from stoker.node_cache.object_cache import node_cache
path, pin = node_cache().fetch(node_cache().version(sys.argv[1]))
import hashlib; print(hashlib.sha256(path.read_bytes()).hexdigest())
"""


def started(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", FETCH, url], stdout=subprocess.PIPE, text=True)


def test_four_processes_that_start_cold_move_the_object_once(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(8 * MIB)
    origin.rate = 16 * MIB
    processes = [started(f"{origin.url}/x") for _ in range(4)]
    digests = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert digests == {hashlib.sha256(data).hexdigest()}
    assert origin.sent == {"x": len(data)} and origin.asked("GET", "x") == 1


def test_a_killed_download_is_gone_on_with(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(8 * MIB)
    origin.rate = 4 * MIB
    process = started(f"{origin.url}/x")
    deadline = time.monotonic() + 60
    while not (kept := sum(entry.here() for entry in cache.entries())) >= 2 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()  # type: ignore[union-attr]
    origin.rate = 0
    assert fetched(cache, f"{origin.url}/x") == data
    last = [wanted for method, _, wanted in origin.requests if method == "GET"][-1]
    start = int(last.removeprefix("bytes=").removesuffix("-"))
    assert start >= kept
    entry = next(cache.entries())
    assert entry.about()["origin_bytes"] <= len(data) and not entry.partial.exists()


@pytest.mark.slow
def test_another_process_goes_on_where_one_was_killed(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(4 * MIB)
    origin.rate = 4 * MIB
    one, other = started(f"{origin.url}/x"), started(f"{origin.url}/x")
    deadline = time.monotonic() + 60
    while sum(entry.here() for entry in cache.entries()) < MIB:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    holder = next(p for p in (one, other) if _downloads(p, cache))
    holder.kill()
    left = other if holder is one else one
    assert left.communicate(timeout=60)[0].strip() == hashlib.sha256(data).hexdigest()
    holder.communicate()
    assert origin.asked("GET", "x") == 2


def _downloads(process: subprocess.Popen[str], cache: NodeCache) -> bool:
    """Whether a process has the partial file open."""
    partial = str(next(cache.entries()).partial)
    files = Path(f"/proc/{process.pid}/fd")
    return any(str(file.readlink()) == partial for file in files.iterdir() if file.is_symlink())


@pytest.mark.parametrize("kept", [0, 1, 3 * MIB - 1])
def test_a_truncated_answer_is_completed(kept: int, origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(3 * MIB)
    origin.cut["x"] = kept
    assert fetched(cache, f"{origin.url}/x") == data
    assert len(data) <= origin.total <= len(data) + min(kept, MIB // 4)  # what was in a buffer came twice
    assert origin.asked("GET", "x") == 2


def test_an_origin_without_ranges_begins_again(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.ranges = False
    origin.objects["x"] = data = random_bytes(3 * MIB)
    origin.cut["x"] = MIB
    assert fetched(cache, f"{origin.url}/x") == data
    assert origin.total == MIB + len(data)


def test_chunks_that_end_early_are_not_kept(origin: CountingOrigin, cache: NodeCache) -> None:
    """Nothing but the end of the chunks says how long the object is."""
    origin.lengths = False
    origin.objects["x"] = data = random_bytes(MIB)
    found = cache.version(f"{origin.url}/x")
    assert found.version.size is None
    origin.cut["x"] = 1000
    path, pin = cache.fetch(found)
    with pin:
        assert path.read_bytes() == data
    assert not origin.cut


def test_a_server_whose_answers_just_end_is_refused(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.closes = True
    origin.objects["x"] = random_bytes(1000)
    with pytest.raises(UserError, match="does not say how long it is"):
        fetched(cache, f"{origin.url}/x")


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


def test_a_model_is_opened_again_without_its_origin(
    cache: NodeCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(object_cache, "FRESH", -1.0)
    index = b'{"weight_map": {"a": "part-1.safetensors"}}'
    files = {"config.json": b"{}", "model.safetensors.index.json": index, "part-1.safetensors": b"1"}
    with CountingOrigin({f"m/{name}": content for name, content in files.items()}) as origin:
        first = with_weights(local_path(f"{origin.url}/m"))
    remote_folder._local_path.cache_clear()  # as in another process
    again = with_weights(local_path(f"{origin.url}/m"))
    assert again == first and {name: (again / name).read_bytes() for name in files} == files
    assert capsys.readouterr().err.count("what it said before is taken") == 1


def test_what_always_ends_early_is_an_error_and_is_kept_for_later(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(MIB)
    origin.ranges = False

    class Always(dict[str, int]):
        def pop(self, *_: object) -> int:  # type: ignore[override]
            return 1000

    origin.cut = Always()
    with pytest.raises(RunFailed, match=r"/x cannot be downloaded"):
        fetched(cache, f"{origin.url}/x")
    assert not any(entry.is_whole for entry in cache.entries())
    origin.cut = {}
    assert fetched(cache, f"{origin.url}/x") == data


def test_new_content_is_another_object(origin: CountingOrigin, cache: NodeCache) -> None:
    for text in (b"one" * 1000, b"two" * 1000):
        origin.objects["x"] = text
        time.sleep(0.01)
        found = cache.version(f"{origin.url}/x?{len(origin.requests)}")  # another URL is asked for anew
        path, pin = cache.fetch(found)
        with pin:
            assert path.read_bytes() == text
    assert len(list(cache.entries())) == 2


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


@pytest.mark.parametrize("header", ["Content-MD5", "Digest"])
def test_a_checksum_that_does_not_fit_is_refused(header: str, origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(MIB)
    kind, name = (hashlib.md5, "") if header == "Content-MD5" else (hashlib.sha256, "sha-256=")
    right, wrong = (name + base64.b64encode(kind(text).digest()).decode() for text in (data, b"other"))
    origin.headers["x"] = {header: wrong}
    with pytest.raises(RunFailed, match="do not fit the checksum"):
        fetched(cache, f"{origin.url}/x")
    assert origin.asked("GET", "x") == 2 and not any(entry.is_whole for entry in cache.entries())
    origin.headers["x"] = {header: right}
    origin.tags["x"] = '"new"'
    assert fetched(cache, f"{origin.url}/x?") == data


def test_a_damaged_part_is_found_when_it_is_gone_on_with(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(2 * MIB)
    origin.headers["x"] = {"Content-MD5": base64.b64encode(hashlib.md5(data).digest()).decode()}
    found = cache.version(f"{origin.url}/x")
    entry = cache.entry(found)
    entry.pin().close()
    entry.note(found.url, found.version)
    entry.partial.write_bytes(b"z" * MIB)  # as a disk may have it after a power cut
    path, pin = cache.fetch(found)
    with pin:
        assert path.read_bytes() == data


def test_a_part_from_before_the_machine_started_is_not_trusted(origin: CountingOrigin, cache: NodeCache) -> None:
    """No checksum says that it is damaged."""
    origin.objects["x"] = data = random_bytes(2 * MIB)
    found = cache.version(f"{origin.url}/x")
    entry = cache.entry(found)
    entry.pin().close()
    entry.note(found.url, found.version, boot="another")
    entry.partial.write_bytes(bytes(MIB))
    path, pin = cache.fetch(found)
    with pin:
        assert path.read_bytes() == data
    assert origin.sent == {"x": len(data)}


def test_a_part_from_a_peer_that_did_not_finish_is_checked(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects["x"] = data = random_bytes(MIB)
    found = cache.version(f"{origin.url}/x")
    entry = cache.entry(found)
    entry.pin().close()
    entry.note(found.url, found.version, peer_bytes=len(data))
    entry.partial.write_bytes(data)
    origin.objects["x"] = random_bytes(MIB, 1)
    with pytest.raises(RunFailed, match="has changed while it was read"):
        cache.fetch(found)
    assert not entry.is_whole


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


def test_the_listing_of_a_model_holds_no_password(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects |= {"m/config.json": b"{}", "m/model.safetensors": b"1", "x.gguf": b"2"}
    there = origin.url.replace("://", "://me:geheim@")
    folder = local_path(f"{there}/m")
    assert (with_weights(folder) / "model.safetensors").read_bytes() == b"1"
    assert local_path(f"{origin.url}/x.gguf?sig=geheim").read_bytes() == b"2"
    assert not any(b"geheim" in path.read_bytes() for path in cache.root.rglob("*") if path.is_file())
    assert all(each.url.startswith(there) for each in remote_folder._objects(folder).values())


OPEN_MODEL = """
import sys
from stoker.node_cache.object_version import ObjectVersion
from stoker.node_cache.origin import OriginStore
from stoker.node_cache.remote_file import RemoteFile
from stoker.node_cache.remote_folder import local_path, with_weights
print((with_weights(local_path(sys.argv[1])) / "model.safetensors").stat().st_size)
"""


@pytest.mark.slow
def test_processes_that_open_a_model_at_once_share_its_folder(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects |= {"m/config.json": b"{}", "m/model.safetensors": random_bytes(MIB)}
    words = [sys.executable, "-c", OPEN_MODEL, f"{origin.url}/m"]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert [process.communicate(timeout=60)[0].strip() for process in processes] == [str(MIB)] * 6
    assert origin.sent == {name: len(data) for name, data in origin.objects.items()}


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
