"""Checkpoints at URLs: visible once they are whole, kept, put aside and cleaned up like those in folders."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from states import assert_saved, state

from stoker.checkpoint.dcp_store import Store, place_of
from stoker.checkpoint.object_collectives import rank
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.snapshots import Snapshots
from stoker.checkpoint.state import DamagedError
from stoker.checkpoint.storage import STATE, attempt_name
from stoker.errors import UserError
from stoker.launch.process_pool import Pool
from stoker.runs.run_folder import RunFolder

ALL = Keep(9)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place in this process' memory, and a folder that is addressed as a URL."""
    path = f"{request.param}://{tmp_path / 'deep' / 'checkpoints'}"
    yield path
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


def files(url: str) -> list[str]:
    system, root = fsspec.core.url_to_fs(url)
    return [path.removeprefix(root) for path in system.find(root)]


def test_saved_loaded_and_kept(url: str) -> None:
    store = Store(url)
    assert store.steps() == []
    store.clean()
    for step in (1, 2, 3, 4):
        assert store.save(state(step)).bytes > 0
    assert store.save(state(4)).bytes == 0
    for step in store.steps():
        assert_saved(store, step)
    assert store.numbers(3) == state(3).numbers
    store.retain(Keep(1, best=2))
    assert store.steps() == [2, 4] and len(files(url)) == 2 * len((STATE, ".metadata", "__0_0.distcp"))


def test_what_is_not_whole_is_no_checkpoint(url: str) -> None:
    store = Store(url)
    store.save(state(1))
    before = files(url)
    attempt = store.storage.begin(2, 2**22 + 1)  # by a process that cannot be
    assert attempt is not None
    with store.storage.create(attempt, "__0_0.distcp") as file:
        file.write(b"half of it")
    assert store.steps() == [1] and len(files(url)) == len(before) + 1
    store.clean()
    assert files(url) == before
    assert attempt_name(2, 0).startswith("step-00000002-")


def test_what_a_living_process_writes_is_left_alone(url: str) -> None:
    storage = Store(url).storage
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as writer:
        attempt = storage.begin(2, writer.pid)
        assert attempt is not None
        with storage.create(attempt, "__0_0.distcp") as file:
            file.write(b"half of it")
        before = files(url)
        storage.clean()
        assert files(url) == before and storage.pending() == [2]
    storage.clean()
    assert not files(url) and storage.pending() == []


def test_damage_is_found_and_put_aside(url: str) -> None:
    store = Store(url)
    store.save(state(1))
    store.save(state(2))
    system, _ = fsspec.core.url_to_fs(url)
    (data,) = (path for path in system.find(store.storage.path(2)) if path.endswith(".distcp"))
    content = bytearray(system.cat_file(data))
    content[len(content) // 2] ^= 1
    system.pipe_file(data, bytes(content))
    with pytest.raises(DamagedError, match=r"__0_0\.distcp has other contents"):
        store.load(2)
    aside = store.put_aside(2)
    assert store.steps() == [1]
    store.clean()
    assert system.exists(aside)  # it can be looked at
    store.save(state(2))
    assert_saved(store, 2)


def go_on_again_and_again(url: str, times: int) -> list[int | None]:
    """Two processes, of which one always looks a little later; the newest checkpoint is damaged each time."""
    system, _ = fsspec.core.url_to_fs(url)
    store = Store(url)
    saver = Saver(store, Snapshots(Path("run")))
    went_on = []
    for time_ in range(times):
        for step in (1, 2):
            store.save(state(step))
        if rank() == 0:
            name = f"{store.storage.path(2)}/{STATE if time_ % 2 else '__0_0.distcp'}"
            content = bytearray(system.cat_file(name))
            content[len(content) // 2] ^= 1
            system.pipe_file(name, bytes(content))
        dist.barrier()
        restored = saver.restore_newest(lambda _: state(0).held)
        went_on.append(restored.step if restored is not None else None)
    return went_on


def test_all_processes_take_the_one_before_a_damaged_one(tmp_path: Path, pool: Pool) -> None:
    assert pool.run(go_on_again_and_again, f"file://{tmp_path / 'checkpoints'}", 30, world=2) == [[1] * 30] * 2


def test_in_the_background(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path / 'checkpoints'}")
    with Saver(store, Snapshots(Path("run"))) as saver:
        for step in range(1, 7):
            saver.save_in_background(state(step), Keep(2, every=3))
        saver.wait()
        assert [outcome.error for outcome in saver.finished()] == [None] * 6
    assert store.steps() == [3, 5, 6]
    for step in store.steps():
        assert_saved(store, step)


def test_a_url_without_its_library_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"checkpoint|nowhere") as caught:
        Store("nowhere://bucket/run").steps()
    assert caught.value.exit_code == 2


def test_where_a_job_puts_them() -> None:
    base, run = Path("/base"), RunFolder(Path("/base/run"))
    assert place_of(None, run, base) == run.checkpoints
    assert place_of("there", run, base) == base / "there"
    assert place_of("s3://bucket/run", run, base) == "s3://bucket/run"


def test_a_checkpoint_that_is_half_deleted_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("memory://half-deleted")
    for step in (1, 2):
        store.save(state(step))

    def fails(*_: object, **__: object) -> None:
        raise ConnectionError("reset")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm", fails)
        with pytest.raises(OSError):
            store.storage.delete(2)
    assert store.steps() == [1]
    store.clean()
    assert len(files("memory://half-deleted")) == 3
    fsspec.filesystem("memory").store.clear()


def test_a_bug_is_no_error_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class ClientError(Exception):
        """As a store's library raises it."""

    def fails(*_: object, **__: object) -> None:
        raise kinds[0]

    monkeypatch.setattr(MemoryFileSystem, "exists", fails)
    kinds: list[Exception] = [ClientError("access denied")]
    with pytest.raises(OSError, match="access denied"):
        Store("memory://place").storage.steps()
    kinds[0] = TypeError("a bug")
    with pytest.raises(TypeError):
        Store("memory://place").storage.steps()


def test_files_of_an_attempt_and_its_state_do_not_count_as_the_checkpoints(url: str) -> None:
    store = Store(url)
    store.save(state(2))
    sizes = store.storage.sizes(2)
    assert set(sizes) == {".metadata", "__0_0.distcp"} and store.storage.room() is None
    system, _ = fsspec.core.url_to_fs(url)
    assert sizes == {name: system.size(f"{store.storage.path(2)}/{name}") for name in sizes}
    system.makedirs(f"{url}/step-00000009")
    system.pipe_file(f"{url}/step-00000009/{STATE}", b"{}")
    assert store.steps() == [2]  # no folder of an attempt
