"""Downloads that are cut off, killed or damaged: they are resumed and checked, or refused."""

from __future__ import annotations

import base64
import hashlib
import signal
import subprocess
import time
from pathlib import Path

import pytest
from counting_origin import CountingOrigin
from object_downloads import MIB, fetched, left_part, random_bytes, started

from stoker.errors import RunFailed, UserError
from stoker.node_cache.object_cache import NodeCache


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
    left_part(cache, found, b"z" * MIB)  # as a disk may have it after a power cut
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


def test_a_part_of_an_object_without_a_size_is_not_gone_on_with(origin: CountingOrigin, cache: NodeCache) -> None:
    """Nothing says how long it is, so that a damaged part would not be noticed."""
    origin.lengths = False
    origin.objects["x"] = data = random_bytes(1000)
    found = cache.version(f"{origin.url}/x")
    left_part(cache, found, bytes(100))
    path, pin = cache.fetch(found)
    with pin:
        assert path.read_bytes() == data
