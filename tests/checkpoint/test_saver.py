"""Saving in the background gives the same checkpoints as saving while training waits, also when a process dies."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from states import assert_saved, state, visible, wait_for_end, wait_for_writers

from stoker.checkpoint.background_writer import BackgroundWriter, PendingWrite
from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.object_collectives import rank
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.save_plan import is_plan_valid
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.snapshots import Snapshots
from stoker.checkpoint.state import Saved, State
from stoker.checkpoint.storage import attempt_name
from stoker.checkpoint.writer import WriteRequest
from stoker.errors import DiskFailed, RunFailed
from stoker.launch.process_pool import Pool
from stoker.runs import shm_folder

ALL = Keep(9)
OWN = f"{shm_folder.OWN}*"  # folders of processes without a run


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    with Saver(Store(tmp_path / "checkpoints"), Snapshots(tmp_path)) as saver:
        yield saver


def test_what_is_saved_in_the_background_is_loaded_to_the_bit(saver: Saver, tmp_path: Path) -> None:
    changing = state(1)
    saver.save_in_background(changing, ALL)
    for tensor in changing.tensors.values():  # as the next step does
        assert isinstance(tensor, torch.Tensor)
        tensor.add_(1)
    for step in range(2, 5):
        saver.save_in_background(state(step), ALL)
    saver.wait()
    assert saver.store.steps() == [1, 2, 3, 4]
    for step in saver.store.steps():
        assert_saved(saver.store, step)
    outcomes = saver.finished()
    assert [(o.step, o.where, o.error) for o in outcomes] == [(step, "disk", None) for step in range(1, 5)]
    assert all(0 < o.stall <= o.seconds and o.bytes > 4 * 40 * 30 for o in outcomes[:1])
    assert saver.finished() == []


def test_the_files_are_those_of_saving_at_a_standstill(saver: Saver, tmp_path: Path) -> None:
    saver.save_in_background(state(3), ALL)
    saver.wait()
    other = Store(tmp_path / "other")
    other.save(state(3))
    names = visible(saver.store.storage.path(3))
    assert names == visible(other.storage.path(3)) == [".metadata", "__0_0.distcp", "state.json"]
    file = "__0_0.distcp"
    assert (saver.store.storage.path(3) / file).read_bytes() == (other.storage.path(3) / file).read_bytes()


def test_the_same_tensors_are_agreed_on_once(saver: Saver) -> None:
    saver.save_in_background(state(1), ALL)
    first = saver.snapshots.plan
    saver.save_in_background(state(2), ALL)
    assert saver.snapshots.plan is first
    saver.wait()


def test_a_new_tensor_is_agreed_on_again(saver: Saver) -> None:
    """The optimizer's states appear with the first step."""
    first, second = state(1), state(2)
    first.tensors.pop("optimizer/a/step")  # type: ignore[attr-defined]
    saver.save_in_background(first, ALL)
    saver.save_in_background(second, ALL)
    saver.wait()
    assert "optimizer/a/step" not in saver.store.load(1).tensors
    assert_saved(saver.store, 2)


def test_the_newest_every_fourth_and_the_best_are_kept(saver: Saver) -> None:
    for step in range(1, 11):
        saver.save_in_background(state(step), Keep(2, every=4, best=3))
    saver.wait()
    assert saver.store.steps() == [3, 4, 8, 9, 10]


def test_a_step_that_is_there_is_not_written_again(saver: Saver) -> None:
    saver.store.save(state(1))
    before = (saver.store.storage.path(1) / "state.json").stat().st_mtime_ns
    saver.save_in_background(state(1), ALL)
    saver.wait()
    assert saver.finished() == [] and (saver.store.storage.path(1) / "state.json").stat().st_mtime_ns == before


def test_a_final_state_that_is_saved_is_not_saved_again(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    saver.attempt(state(1), ALL)
    saved: list[int] = []
    monkeypatch.setattr(saver, "save", lambda given, _: saved.append(given.step))
    saver.finish(state(1), ALL)
    assert not saved
    saver.finish(state(2), ALL)
    assert saved == [2]


@pytest.mark.parametrize(("number", "tries"), [(errno.ENOSPC, 2), (errno.EACCES, 1)])
def test_only_a_full_disk_is_tried_again(
    number: int, tries: int, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def fails(_: Store, given: State, plan: object) -> None:
        tried.append(given.step)
        raise DiskFailed("no") from OSError(number, os.strerror(number))

    monkeypatch.setattr(Store, "save", fails)
    monkeypatch.setattr(saver, "_room_for", lambda *_, **__: ())
    with pytest.raises(DiskFailed):
        saver.save(state(1), ALL)
    assert tried == [1] * tries


def test_a_plan_whose_files_are_gone_is_not_valid(saver: Saver) -> None:
    held = state(1).held
    plan = saver.snapshots.plan_for(held)
    assert is_plan_valid(plan, held, intact=True) and not is_plan_valid(plan, held, intact=False)


def test_without_room_in_memory_it_is_saved_at_a_standstill(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.checkpoint import save_plan

    monkeypatch.setattr(save_plan, "SPARE", 0.0)
    saver.save_in_background(state(1), ALL)
    (outcome,) = saver.finished()  # it is there at once
    assert outcome.stall == outcome.seconds
    assert_saved(saver.store, 1)


def limit(saver: Saver, size: int) -> None:
    """No file of the writer may grow beyond this: the system's own error, as of a full disk."""
    resource.prlimit(saver.snapshots.writer.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("size", [0, 1024], ids=["nothing can be written", "the tensors do not fit"])
def test_a_full_disk_leaves_what_was_there_and_the_next_is_tried(size: int, saver: Saver) -> None:
    saver.save_in_background(state(1), ALL)
    saver.wait()
    limit(saver, size)
    saver.save_in_background(state(2), ALL)
    saver.wait()
    first, failed = saver.finished()
    assert first.error is None and isinstance(failed.error, RunFailed)
    assert "the disk is full: the checkpoint of step 2 was not written" in str(failed.error)
    assert "step 1 is whole" in str(failed.error)
    assert isinstance(saver.store.folder, Path) and visible(saver.store.folder) == ["step-00000001"]

    limit(saver, resource.RLIM_INFINITY)  # somebody makes room
    saver.save_in_background(state(3), ALL)  # training waits, since only so can older checkpoints be deleted in time
    (outcome,) = saver.finished()
    assert outcome.stall == outcome.seconds
    assert_saved(saver.store, 3)
    saver.save_in_background(state(4), ALL)
    assert saver.snapshots.writer.pending is not None  # in the background again
    saver.wait()
    assert_saved(saver.store, 4)


def test_a_last_step_whose_checkpoint_failed_in_the_background_is_saved_at_the_end(saver: Saver) -> None:
    saver.attempt(state(1), ALL)
    saver.wait()
    limit(saver, 1024)
    saver.attempt(state(2), ALL)
    saver.finish(state(2), ALL)
    assert_saved(saver.store, 2)


def test_a_checkpoint_is_reported_once(saver: Saver) -> None:
    saver.save_in_background(state(1), ALL)
    deadline = time.monotonic() + 30
    while not (reported := saver.finished()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    saver.wait()
    assert [outcome.step for outcome in reported] == [1] and saver.finished() == []


def test_a_committed_checkpoint_whose_report_is_late_stays(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    saver.save_in_background(state(1), ALL)
    while not saver.store.steps():
        time.sleep(0.01)
    answer = BackgroundWriter.answer

    def late(writer: BackgroundWriter, kind: str, *, timeout: float | None = None) -> dict[str, Any] | None:
        return None if kind == "committed" else answer(writer, kind, timeout=timeout)

    monkeypatch.setattr(BackgroundWriter, "answer", late)
    saver.wait()
    (done,) = saver.finished()
    assert done.error is None and done.bytes > 0
    assert_saved(saver.store, 1)


def test_an_attempt_that_is_not_complete_in_time_is_given_up(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(saver.snapshots.writer.pid, signal.SIGSTOP)
    saver.save_in_background(state(1), ALL)
    answers = {"written": {"written": 1}}
    monkeypatch.setattr(BackgroundWriter, "answer", lambda _, kind, timeout=None: answers.get(kind))
    saver.wait()
    (failed,) = saver.finished()
    assert "a folder that all machines share" in str(failed.error)
    assert isinstance(saver.store.folder, Path) and visible(saver.store.folder) == []


def test_a_writer_that_is_killed_is_reported_and_another_is_started(saver: Saver) -> None:
    os.kill(saver.snapshots.writer.pid, signal.SIGSTOP)
    saver.save_in_background(state(1), ALL)
    os.kill(saver.snapshots.writer.pid, signal.SIGKILL)
    saver.wait()
    (failed,) = saver.finished()
    assert failed.error is not None and "writer ended with exit code -9" in str(failed.error)
    assert saver.store.steps() == []
    saver.save_in_background(state(2), ALL)
    saver.wait()
    assert_saved(saver.store, 2)
    saver.store.clean()
    assert isinstance(saver.store.folder, Path) and visible(saver.store.folder) == ["step-00000002"]


SAVING = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from states import state
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.snapshots import Snapshots
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.dcp_store import Store
saver = Saver(Store(Path(sys.argv[1])), Snapshots(Path("run")))
for step in range(1, 10_000):
    saver.save_in_background(state(step), Keep(3))
    print(step, saver.snapshots.writer.pid, flush=True)
"""


@pytest.mark.slow
def test_kill_9_at_any_time_leaves_whole_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    """Several times over the same folder: the writer finishes its checkpoint and frees its memory."""
    before = set(Path("/dev/shm").glob(OWN))
    store = Store(tmp_path / "checkpoints")
    newest = 0
    for pause in (0.0, 0.013, 0.05, 0.11):
        command = [sys.executable, "-c", SAVING, str(store.folder), str(Path(__file__).parent)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        begun = writer = 0
        while begun <= newest + 2:  # the steps that are there already are skipped
            begun, writer = map(int, process.stdout.readline().split())
        time.sleep(pause)
        process.kill()
        rest, _ = process.communicate()
        begun = max([begun, *(int(line.split()[0]) for line in rest.splitlines())])
        wait_for_end(writer)  # it deletes old checkpoints after it has written its last one
        assert store.storage.pending() == []
        store.clean()
        steps = store.steps()
        assert steps and steps[-1] >= begun - 1  # the one before was whole when this one began
        for step in steps:
            assert_saved(store, step)
        assert isinstance(store.folder, Path) and len(visible(store.folder)) == len(steps)
        newest = steps[-1]
    deadline = time.monotonic() + 10
    while set(Path("/dev/shm").glob(OWN)) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(Path("/dev/shm").glob(OWN)) - before


def test_an_error_in_training_does_not_stop_the_writer(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ZeroDivisionError), Saver(store, Snapshots(tmp_path)) as saver:
        saver.save_in_background(state(1), ALL)
        raise ZeroDivisionError
    wait_for_writers(store)
    assert_saved(store, 1)


def test_what_other_processes_are_writing_is_not_cleaned_away(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / f".partial-{attempt_name(3, os.getppid())}").mkdir()
    (tmp_path / f".partial-{attempt_name(2, 2**22 + 1)}").mkdir()  # of a process that cannot be
    store.clean()
    assert store.storage.pending() == [3] and store.storage.steps() == []
    assert len(visible(tmp_path)) == 1


def test_what_a_process_wrote_whose_number_another_or_a_thread_has_now_is_cleaned_away(tmp_path: Path) -> None:
    store, ended = Store(tmp_path), threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    in_2023 = attempt_name(2, os.getppid()).rpartition(".")[0] + ".1700000000000000000"
    for name in (attempt_name(3, thread.native_id or 0), in_2023):
        (tmp_path / f".partial-{name}").mkdir()
    assert store.storage.pending() == []
    store.clean()
    ended.set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["", "file://"])
def test_a_writer_of_an_earlier_process_cannot_finish_a_step_that_will_be_taken_again(url: str, tmp_path: Path) -> None:
    store = Store(f"{url}{tmp_path}" if url else tmp_path)
    store.save(state(3))
    attempts = {step: store.storage.begin(step, os.getppid()) for step in (2, 4)}
    for attempt in attempts.values():
        assert attempt is not None
        with store.storage.create(attempt, "__0_0.distcp") as file:
            file.write(b"half of it")
    assert sorted(store.storage.pending()) == [2, 4]
    store.forget_after(3)
    assert store.storage.pending() == [2] and store.steps() == [3]
    with pytest.raises(FileNotFoundError):
        store.storage.names(str(attempts[4]))


def test_the_newest_state_is_restored_and_one_before_a_step(saver: Saver) -> None:
    def places(saved: dict[str, Saved]) -> dict[str, list[object]]:
        return state(0).held  # type: ignore[return-value]

    assert saver.restore_newest(places) is None and not saver.has_state()  # type: ignore[arg-type]
    for step in (2, 4, 6):
        saver.save_in_background(state(step), ALL)
    assert saver.has_state()
    restored = saver.restore_newest(places, before=6)  # type: ignore[arg-type]
    assert restored is not None and (restored.step, restored.where) == (4, "disk")
    assert restored.numbers == state(4).numbers
    assert saver.store.steps() == [2, 4]  # the run is going to take the steps after it another time


def test_an_answer_may_come_in_parts() -> None:
    made: Any = BackgroundWriter()
    read, write = os.pipe()
    made._process = SimpleNamespace(stdout=os.fdopen(read, "rb"))
    made.pending = SimpleNamespace(step=3, answers=[])
    for part in (b'{"step": 3, "wri', b'tten": 7', b'}\n{"step": 3, "comm'):
        assert made.answer("written", timeout=0.0) is None
        os.write(write, part)
    assert made.answer("written", timeout=0.0)["written"] == 7
    os.write(write, b'itted": 8}\n')
    assert made.answer("committed", timeout=0.0)["committed"] == 8
    os.close(write)


def test_the_answers_of_a_writer_do_not_begin_with_the_last_words_of_another(saver: Saver) -> None:
    writer: Any = saver.snapshots.writer
    read, write = os.pipe()
    writer._process = SimpleNamespace(stdout=os.fdopen(read, "rb"), wait=lambda: -9, poll=lambda: -9)
    writer.pending = SimpleNamespace(step=1, answers=[])
    os.write(write, b'{"step": 1, "wri')
    os.close(write)
    assert "exit code -9" in writer.answer("written")["error"]
    writer.pending = None
    saver.save_in_background(state(2), ALL)
    saver.wait()
    assert_saved(saver.store, 2)


def test_a_checkpoint_is_over_when_old_ones_are_deleted() -> None:
    made: Any = BackgroundWriter()
    read, write = os.pipe()
    made._process = SimpleNamespace(stdout=os.fdopen(read, "rb"))
    made.pending = SimpleNamespace(step=3, answers=[])
    os.write(write, b'{"step": 3, "written": 7}\n{"step": 3, "committed": 7, "at": 1.0}\n')
    deleted = []

    def delete() -> None:
        deleted.append(3)
        os.write(write, b'{"step": 3, "retained": true}\n')

    late = threading.Timer(0.3, delete)
    late.start()
    assert made.outcome()["committed"] == 7 and deleted
    late.join()
    os.close(write)


def test_the_writer_gets_no_signals_of_the_terminal(saver: Saver) -> None:
    pid = saver.snapshots.writer.pid
    assert os.getsid(pid) == pid


def without_a_layout(run: Path) -> tuple[list[str], list[int]]:
    """Saves by a group of which the last process cannot write its part."""
    with Saver(Store(run / "checkpoints"), Snapshots(run)) as saver:
        writer = saver.snapshots.writer
        write = writer.write

        def failing(request: WriteRequest, pending: PendingWrite) -> None:
            write(replace(request, file_layout=f"{request.file_layout}-gone"), pending)

        if rank() == 1:
            writer.write = failing  # type: ignore[method-assign]
        saver.save_in_background(state(1), ALL)
        saver.wait()
        failures = [str(outcome.error) for outcome in saver.finished()]
        writer.write = write  # type: ignore[method-assign]
        saver.save_in_background(state(2), ALL)
        saver.wait()
        return failures, saver.store.steps()


def test_a_part_that_one_process_could_not_write_ends_the_checkpoint_of_all(tmp_path: Path, pool: Pool) -> None:
    for failures, steps in pool.run(without_a_layout, tmp_path, world=2):
        (failure,) = failures
        assert "No such file" in failure and steps == [2]
    assert visible(tmp_path / "checkpoints") == ["step-00000002"]


def test_old_checkpoints_that_are_not_deleted_in_time_do_not_hold_training_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.checkpoint.background_writer.DELETES", 0.05)
    made: Any = BackgroundWriter()
    read, write = os.pipe()
    made._process = SimpleNamespace(stdout=os.fdopen(read, "rb"))
    made.pending = SimpleNamespace(step=3, answers=[])
    os.write(write, b'{"step": 2, "committed": 5, "at": 0.5}\n')  # a late answer about the checkpoint before
    os.write(write, b'{"step": 3, "written": 7}\n{"step": 3, "committed": 7, "at": 1.0}\n')
    assert made.outcome()["committed"] == 7
    os.close(write)
