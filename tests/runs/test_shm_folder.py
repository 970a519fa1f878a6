"""A run's folder in shared memory: nobody removes it while the run lives, and somebody does afterwards."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from stoker.checkpoint.snapshots import Snapshots
from stoker.cli.train.start_over import put_run_aside
from stoker.errors import DiskFailed, Interrupted, RunFailed
from stoker.runs.kept_copies import is_kept
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_memory import shared_memory, shared_with_others
from stoker.runs.shm_folder import SharedFolder, has_folder, shared_folder

HOLDING = """
import sys, time
from pathlib import Path
from stoker.runs.shared_memory import shared_memory
with shared_memory(Path(sys.argv[1])) as folder:
    (folder.path / "copy").touch()
    time.sleep(60)
"""
OTHER_CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def run_of(base: Path, name: str) -> Path:
    (base / name).mkdir()
    return base / name


def other(run: Path) -> subprocess.Popen[bytes]:
    """Another process that holds a run's shared memory, where its process ids mean nothing here, if that can be."""
    trial = [*OTHER_CONTAINER, "true"]
    may = shutil.which("unshare") and subprocess.run(trial, capture_output=True, check=False).returncode == 0
    holder = subprocess.Popen([*(OTHER_CONTAINER if may else []), sys.executable, "-c", HOLDING, str(run)])
    deadline = time.monotonic() + 30
    while not (shared_folder(run) / "copy").exists():
        assert holder.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return holder


def end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()


def test_another_container_leaves_a_live_run_alone_and_removes_a_dead_one(tmp_path: Path) -> None:
    mine, theirs = run_of(tmp_path, "mine"), run_of(tmp_path, "theirs")
    with shared_memory(mine) as folder:
        (folder.path / "copy").touch()
        holder = other(theirs)
        assert (folder.path / "copy").exists()  # it has looked for what was left behind
        with shared_memory(run_of(tmp_path, "third")):  # and so has this process now
            assert (shared_folder(theirs) / "copy").exists()
        with pytest.raises(RunFailed, match="another process holds"):
            held = SharedFolder(shared_folder(theirs))
            held.hold(patience=0.1)
        end(holder)
        deadline = time.monotonic() + 10
        fourth = run_of(tmp_path, "fourth")
        while shared_folder(theirs).exists():  # the process in the container ends a moment later
            assert time.monotonic() < deadline
            with shared_memory(fourth):
                assert (folder.path / "copy").exists()
    assert not shared_folder(mine).exists()


def test_only_folders_of_runs_and_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /dev/shm they lie among other programs' temporary files."""
    monkeypatch.setattr("stoker.runs.shm_folder.os.access", lambda path, mode: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    left, of_process = tmp_path / "tmp/stoker_run-0123456789ab", tmp_path / "tmp/stoker_process-abcdefgh"
    theirs = [tmp_path / "tmp/stoker_projects", tmp_path / "tmp/stoker_data-2026"]
    for folder in (left, of_process, *theirs):
        folder.mkdir(parents=True)
    with shared_memory(run_of(tmp_path, "mine")):
        assert not left.exists() and not of_process.exists()
        assert all(folder.exists() for folder in theirs)


def test_a_folder_that_was_removed_is_made_and_held_again(tmp_path: Path) -> None:
    with shared_memory(tmp_path) as folder:
        shutil.rmtree(folder.path)
        folder.path.mkdir()  # by a process that makes its copies again
        (folder.path / "copy").touch()
        folder.keep()
        holder = other(run_of(tmp_path, "other"))
        end(holder)
        assert (folder.path / "copy").exists()
        shutil.rmtree(folder.path)
        folder.keep()
        assert folder.path.is_dir()
    assert not shared_folder(tmp_path).exists()


def test_the_last_state_is_kept_for_the_run_that_it_is_of(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run")
    RunFolder(run).event("started", steps=3)
    with pytest.raises(DiskFailed, match=r"the disk is full\. Step 3 is kept in"), shared_memory(run) as folder:
        (folder.path / "rank-0").mkdir()
        (folder.path / "rank-0" / "slot-0.json").write_text('{"step": 3}')
        raise DiskFailed("the disk is full")
    with shared_memory(run_of(tmp_path, "another")):
        assert is_kept(run) and (folder.path / "rank-0").exists()
    with suppress(KeyboardInterrupt), shared_memory(run):
        assert (folder.path / "rank-0").exists()
        raise KeyboardInterrupt
    RunFolder(run).events.unlink()
    RunFolder(run).event("started", steps=4)  # another run at the same place
    assert not is_kept(run)
    with shared_memory(run):
        assert not (folder.path / "rank-0").exists()
    assert not shared_folder(run).exists()


def test_a_state_that_an_earlier_version_kept_is_found(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run")
    RunFolder(run).event("started", steps=3)
    with pytest.raises(DiskFailed), shared_memory(run) as folder:
        (folder.path / "rank-0").mkdir()
        (folder.path / "rank-0" / "slot-0.json").write_text('{"step": 3}')
        raise DiskFailed("the disk is full")
    (folder.path / "kept").write_text(RunFolder(run).identity() or "")
    with shared_memory(run_of(tmp_path, "another")):
        assert is_kept(run) and (folder.path / "rank-0").exists()
    with shared_memory(run):
        assert (folder.path / "rank-0").exists()


def test_a_run_that_is_set_aside_keeps_its_state_until_it_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, aside = run_of(tmp_path, "run"), tmp_path / "run.1"
    kept = _kept(run)
    put_run_aside(run, None, tmp_path)
    assert capsys.readouterr().err == (
        f"the earlier run is now in {aside}\nits step 3 stays in this machine's memory until {aside} is removed\n"
    )
    assert not kept.exists() and is_kept(aside)
    with shared_memory(run_of(tmp_path, "run")):
        assert (shared_folder(aside) / "rank-0").exists()
    put_run_aside(aside, None, tmp_path)
    memory = shared_folder(tmp_path / "run.1.1")
    assert is_kept(tmp_path / "run.1.1")
    shutil.rmtree(tmp_path / "run.1.1")
    with shared_memory(run_of(tmp_path, "another")):
        assert not memory.exists()


def _kept(run: Path) -> Path:
    """The shared memory of a run that ended since its last state could not be written."""
    (run / "job.yaml").write_text("task: sft\n")
    RunFolder(run).event("started", steps=3)
    with pytest.raises(DiskFailed), shared_memory(run) as folder:
        (folder.path / "rank-0").mkdir()
        (folder.path / "rank-0" / "slot-0.json").write_text('{"step": 3}')
        raise DiskFailed("the disk is full")
    return folder.path


def test_kept_copies_follow_a_run_that_another_node_set_aside(tmp_path: Path) -> None:
    memory, aside = _kept(run_of(tmp_path, "run")), tmp_path / "run.1"
    (tmp_path / "run").rename(aside)
    run_of(tmp_path, "run")  # the new run, of both nodes
    with shared_memory(tmp_path / "run"):
        assert not memory.exists() and is_kept(aside)
        assert (shared_folder(aside) / "rank-0/slot-0.json").exists()
    shutil.rmtree(aside)
    with shared_memory(tmp_path / "run"):
        assert not list(memory.parent.glob("stoker_run.1-*"))


def test_the_memory_of_a_run_that_another_one_replaced_is_freed(tmp_path: Path) -> None:
    memory = _kept(run_of(tmp_path, "run"))
    (tmp_path / "run").rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")  # so that its inode is not used again
    run_of(tmp_path, "run")
    with shared_memory(tmp_path / "run"):
        assert not memory.exists()


def test_a_run_whose_folder_is_gone_keeps_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run")
    with pytest.raises(DiskFailed, match=r"^no such folder$"), shared_memory(run) as folder:
        (folder.path / "rank-0").mkdir()
        (folder.path / "rank-0" / "slot-0.json").write_text('{"step": 3}')
        shutil.rmtree(run)
        raise DiskFailed("no such folder")
    assert not folder.path.exists()


@pytest.mark.parametrize(
    ("removed", "kept"),
    [("run", False), ("", False), ("", True), ("mount point", True), ("nothing", True)],
    ids=["run", "its parent", "another disk", "a mount point that went with its disk", "a disk with errors"],
)
def test_the_memory_of_a_run_that_was_removed_is_freed(
    removed: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    run = run_of(disk, "run")
    RunFolder(run).event("started", steps=3)
    with pytest.raises(DiskFailed), shared_memory(run) as folder:
        (folder.path / "rank-0").mkdir()
        (folder.path / "rank-0" / "slot-0.json").write_text('{"step": 3}')
        raise DiskFailed("the disk is full")
    if removed == "mount point":  # the run was on another device than its parent
        record = json.loads((folder.path / "kept").read_text())
        for place in record["places"][:2]:
            place[0] += 1
        (folder.path / "kept").write_text(json.dumps(record))
        shutil.rmtree(disk)
    elif removed == "nothing":
        honest = os.lstat

        def lstat(path: Any, **options: Any) -> os.stat_result:
            if str(path) == str(run):
                raise OSError(errno.EIO, "Input/output error")
            return honest(path, **options)

        monkeypatch.setattr(os, "lstat", lstat)
    elif kept:
        disk.rename(tmp_path / "away")
        disk.mkdir()  # as the mount point of a disk that is missing
    else:
        shutil.rmtree(disk / removed)
    with shared_memory(run_of(tmp_path, "another")):
        assert folder.path.exists() == kept
    shutil.rmtree(folder.path, ignore_errors=True)


@pytest.mark.parametrize(
    ("saved", "keeps", "kept"),
    [(2, True, True), (3, True, False), (2, False, False), (None, True, False)],
    ids=["newer", "saved", "at once", "recorded on another machine"],
)
def test_a_stop_that_could_not_save_keeps_a_newer_state(
    saved: int | None, keeps: bool, kept: bool, tmp_path: Path
) -> None:
    run = run_of(tmp_path, "run")
    for step, where in ((0, ""), (saved, "disk"), (3, "memory")) if saved is not None else ():
        RunFolder(run).event("saved" if step else "started", step=step, where=where)
    with pytest.raises(Interrupted) as stopped, shared_memory(run) as folder:
        (folder.path / "rank-0").mkdir()
        (folder.path / "rank-0" / "slot-0.json").write_text('{"step": 3}')
        raise Interrupted(15, keeps=keeps)
    assert is_kept(run) == shared_folder(run).exists() == kept
    notes = getattr(stopped.value, "__notes__", [])
    assert [note.startswith("Step 3 is kept in this machine's memory") for note in notes] == [True] * kept
    shutil.rmtree(shared_folder(run), ignore_errors=True)


def test_copies_wait_for_the_processes_that_a_launcher_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun ends all of a machine's processes before it starts the next ones: nobody holds the folder meanwhile."""
    run, another = run_of(tmp_path, "run"), run_of(tmp_path, "another")
    copy = shared_folder(run) / "copy"

    def started(*, anew: bool, left: int, removes: bool = True) -> AbstractContextManager[None]:
        return shared_with_others(run, clears=anew, removes=removes, again=left > 0, wait=lambda: None)

    with suppress(RuntimeError), started(anew=True, left=1), started(anew=False, left=1, removes=False):
        copy.touch()
        raise RuntimeError
    with shared_memory(another):
        assert copy.exists()
    with monkeypatch.context() as later:
        later.setattr("stoker.runs.shared_memory.RESTART", 0.0)
        with started(anew=False, left=0), shared_memory(another):
            assert copy.exists()  # it is held
    assert not shared_folder(run).exists()
    with suppress(RuntimeError), started(anew=True, left=1):
        copy.touch()
        raise RuntimeError
    with suppress(RuntimeError), started(anew=True, left=0):
        assert not copy.exists()  # of another start by hand
        raise RuntimeError
    assert not shared_folder(run).exists()


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(RunFailed, match="belongs to another user"), shared_memory(tmp_path):
        pass
    shutil.rmtree(shared_folder(tmp_path))


@pytest.mark.parametrize("what", ["link", "writable by its group", "writable by all", "foreign"])
def test_a_folder_that_somebody_else_has_prepared_is_not_used(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, "run")
    folder = shared_folder(run)
    (tmp_path / "theirs").mkdir(mode=0o700)
    try:
        if what == "link":
            folder.symlink_to(tmp_path / "theirs")
        else:
            folder.mkdir(mode=0o700)
        assert has_folder(run) == (what != "link")
        if what.startswith("writable"):
            folder.chmod(0o720 if what.endswith("group") else 0o702)
        if what == "foreign":
            monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        assert not has_folder(run) and not Snapshots(run).outlives
        if not what.startswith("writable"):
            with pytest.raises(RunFailed, match="remove it"):
                SharedFolder(folder).hold()
    finally:
        folder.unlink() if folder.is_symlink() else folder.rmdir()
