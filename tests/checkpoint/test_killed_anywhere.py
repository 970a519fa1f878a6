"""kill -9 between any two operations on files: the state that follows is whole, and never older than before."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from states import state
from test_full_disk import size_of

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.snapshots import Snapshots
from stoker.checkpoint.state import Restored, State
from stoker.checkpoint.storage import LocalStorage
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_memory import shared_memory

TWO = Keep(2)
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")


def killed_before(change: int, act: Callable[[], None]) -> bool:
    """Acts in a copy of this process that ends before its n-th change of a file; says whether it came so far."""
    child = os.fork()
    if child == 0:
        left = [change]

        def count(event: str, arguments: tuple[object, ...]) -> None:
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if event in CHANGES or writes:
                if left[0] == 0:
                    os._exit(9)
                left[0] -= 1

        fsync = os.fsync

        def sync(descriptor: int) -> None:
            count("os.rename", ())
            fsync(descriptor)

        os.fsync = sync
        sys.addaudithook(count)
        try:
            act()
        except BaseException:
            os._exit(2)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def restored(saver: Saver) -> tuple[Restored, State]:
    target = state(0)
    found = saver.restore_newest(lambda _: target.held)
    assert found is not None
    return found, target


def saver_of(run: Path) -> Saver:
    return Saver(Store(run / "checkpoints"), Snapshots(run), background=False, memory=1)


def save(run: Path) -> None:
    saver_of(run).save(state(3), TWO)


def remember(run: Path) -> None:
    saver_of(run).remember(state(3))


def go_on(run: Path) -> None:
    """After damage to the newest."""
    (file,) = (run / "checkpoints" / "step-00000002").glob("*.distcp")
    with file.open("r+b") as opened:
        opened.truncate(100)
    restored(saver_of(run))


def go_back(run: Path) -> None:
    target = state(0)
    saver_of(run).restore_newest(lambda _: target.held, before=2)


@pytest.mark.parametrize(
    ("act", "memory", "least"),
    [(save, False, 2), (save, True, 2), (remember, True, 2), (go_on, False, 1), (go_back, False, 1)],
)
@pytest.mark.parametrize("small_disk", [False, True])
@pytest.mark.slow
@pytest.mark.often(
    "True-save-False-2", "True-save-True-2", "True-remember-True-2", "False-go_on-False-1", "False-go_back-False-1"
)
def test_killed_anywhere(
    act: Callable[[Path], None],
    memory: bool,
    least: int,
    small_disk: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change = 0
    comes_so_far = True
    while comes_so_far:
        run = tmp_path / f"run-{change}"
        run.mkdir()
        RunFolder(run).event("started")
        with shared_memory(run) if memory else nullcontext():
            saver = saver_of(run)
            for step in (1, 2):
                saver.save(state(step), TWO)
            if memory:
                saver.remember(state(2))
            saver.close()
            if small_disk:  # with what is there it is nearly full
                most = size_of(run) + 1000
                monkeypatch.setattr(LocalStorage, "room", lambda _, most=most, run=run: most - size_of(run))
                monkeypatch.setattr("stoker.checkpoint.disk_space.SPARE", 500)
            comes_so_far = killed_before(change, lambda run=run: act(run))  # type: ignore[misc]
            monkeypatch.undo()
            again = saver_of(run)
            again.store.clean()
            found, got = restored(again)
            assert found.step >= least and found.numbers == state(found.step).numbers, change
            for name, tensor in state(found.step).tensors.items():
                assert torch.equal(got.tensors[name], tensor), (change, name)  # type: ignore[arg-type]
            again.save(state(4), TWO)
            assert again.store.steps()[-1] == 4
            names = {path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step-")}
            assert names <= {"damaged-step-00000002"}, (change, names)
            again.close()
        change += 1
    assert change > 2
