"""Copies in memory: a group of processes goes on from them under any layout, if they are whole."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from states import assert_saved, state

from stoker.checkpoint import shm_buffers
from stoker.checkpoint.chunks import Chunk, Held
from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.gather import gather_whole
from stoker.checkpoint.memory_restore import MemoryCopies, steps_in_memory
from stoker.checkpoint.object_collectives import rank
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.save_plan import SPARE, Item, make_write_plan
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.shm_buffers import copies_in, forget_copies
from stoker.checkpoint.snapshots import Snapshots
from stoker.checkpoint.state import State
from stoker.launch.process_pool import Pool
from stoker.runs.shared_memory import shared_memory
from stoker.runs.shm_folder import NEIGHBOUR, SENT, shared_folder, stamp_of

SHAPE = (8, 12)
# How many processes cut the rows, and how many the columns.
CUTS = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}


def whole(step: int) -> torch.Tensor:
    return torch.arange(96, dtype=torch.float64).view(SHAPE) + 1000 * step


def held(step: int | None, *, replicated: bool = False) -> Held:
    """What this process has of two tensors: its box of one, all of the other; nothing in them without a step."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rows, columns = (1, 1) if replicated else CUTS[world]
    at = (0, 0) if replicated else divmod(rank(), columns)
    sizes = SHAPE[0] // rows, SHAPE[1] // columns
    offsets = at[0] * sizes[0], at[1] * sizes[1]
    box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    cut = whole(step)[box].clone() if step is not None else torch.zeros(sizes, dtype=torch.float64)
    counter = torch.tensor(float(step if step is not None else -1))
    return {"model/a": [Chunk(cut, offsets, SHAPE)], "optimizer/a/step": [Chunk.whole(counter)]}


def saver_of(run: Path) -> Saver:
    return Saver(Store(run / "checkpoints"), Snapshots(run), memory=1)


def remember(run: Path, steps: list[int], *, replicated: bool = False, torn: int | None = None) -> None:
    """Copies of some steps; then rank ``torn``, if any, dies while it makes another."""
    saver = saver_of(run)
    for step in steps:
        saver.remember(State(step, held(step, replicated=replicated), {"progress": {"step": step}}))
    if torn == rank():
        slot = saver.snapshots.free()
        assert slot is not None
        slot.header.unlink()  # as before the bytes change
    elif torn is not None:
        saver.snapshots.copy(steps[-1] + 1, held(steps[-1] + 1), {"progress": {}})  # type: ignore[union-attr]
    saver.close()


def restored(run: Path, before: int | None = None, replicated: bool = False) -> tuple[int, str, dict, dict] | None:
    """What is restored, and the whole tensors then."""
    saver = saver_of(run)
    target = held(None, replicated=replicated)
    found = saver.restore_newest(lambda saved: target, before=before)
    saver.close()
    return (found.step, found.where, found.numbers, gather_whole(target)) if found else None


def assert_restored(found: tuple[int, str, dict, dict] | None, step: int, where: str = "memory") -> None:
    assert found is not None and found[:3] == (step, where, {"progress": {"step": step}})
    assert torch.equal(found[3]["model/a"], whole(step)) and found[3]["optimizer/a/step"] == step


@pytest.mark.parametrize("made", CUTS)
@pytest.mark.parametrize("read", CUTS)
def test_copies_of_any_layout_are_read_under_any_other(made: int, read: int, tmp_path: Path, pool: Pool) -> None:
    with shared_memory(tmp_path):
        pool.run(remember, tmp_path, [1, 2, 3], world=made)
        found = pool.run(restored, tmp_path, world=read)
        assert_restored(found[0], 3)
        assert all(other is not None and other[0] == 3 for other in found)


def test_what_all_hold_is_copied_once(tmp_path: Path, pool: Pool) -> None:
    with shared_memory(tmp_path) as shared:
        pool.run(_remember_replicas, tmp_path, world=3)
        sizes = [path.stat().st_size for path in shared.path.glob("rank-*/slot-0")]
        assert len(sizes) == 3 and sum(sizes) <= 8 * 96 + 2 * 64
        assert_restored(pool.run(restored, tmp_path, None, True, world=2)[0], 2)


def _remember_replicas(run: Path) -> None:
    remember(run, [1, 2], replicated=True)


def _remember_torn(run: Path) -> None:
    remember(run, [5, 6, 7], torn=1)


def test_a_copy_that_one_process_could_not_finish_is_none(tmp_path: Path, pool: Pool) -> None:
    """The others have one of step 8; the one of step 7 is there on all."""
    with shared_memory(tmp_path) as shared:
        pool.run(_remember_torn, tmp_path, world=2)
        assert 8 in {copy.step for copy in copies_in(shared.path)}
        assert_restored(pool.run(restored, tmp_path, world=2)[0], 7)
        assert {copy.step for copy in copies_in(shared.path)} == {7}  # step 8 will be taken another time


def test_a_process_whose_memory_is_gone_leaves_the_disk(tmp_path: Path, pool: Pool) -> None:
    with shared_memory(tmp_path) as shared:
        pool.run(_save_and_remember, tmp_path, world=2)
        for path in (shared.path / "rank-1").glob("slot-*"):
            path.unlink()
        assert_restored(pool.run(restored, tmp_path, world=2)[0], 2, "disk")


def _save_and_remember(run: Path) -> None:
    saver = saver_of(run)
    saver.save(State(2, held(2), {"progress": {"step": 2}}), Keep(2))
    saver.close()
    remember(run, [3, 4])


def _save_remember_and_lose(run: Path) -> list[str | None]:
    """Checkpoints and copies, between which something removes what lies in shared memory; how each ended."""
    saver = saver_of(run)
    for step in range(1, 7):
        saver.save_in_background(State(step, held(step), {"progress": {"step": step}}), Keep(9))
        saver.wait()
        saver.remember(State(step, held(step), {"progress": {"step": step}}))
        dist.barrier()
        if rank() == 0 and step == 2:
            shutil.rmtree(saver.snapshots.folder)
        if rank() == 0 and step == 4:
            for path in [*saver.snapshots.folder.rglob("file_layout-*"), *saver.snapshots.folder.rglob("slot-0*")]:
                path.unlink()
        dist.barrier()
    saver.close()
    return [str(outcome.error) if outcome.error else None for outcome in saver.finished()]


def test_a_plan_is_made_though_its_folder_has_just_been_removed(tmp_path: Path) -> None:
    assert make_write_plan(state(1).held, tmp_path / "gone").slots == 2


def test_what_something_has_removed_is_made_again(tmp_path: Path, pool: Pool) -> None:
    with shared_memory(tmp_path) as shared:
        outcomes = pool.run(_save_remember_and_lose, tmp_path, world=2)[0]
        assert outcomes and set(outcomes) == {None}
        assert Store(tmp_path / "checkpoints").steps() == [1, 2, 3, 4, 5, 6]
        assert_restored(pool.run(restored, tmp_path, world=2)[0], 6)
        for path in shared.path.glob("rank-*/slot-?"):
            path.unlink()
        assert_restored(pool.run(restored, tmp_path, world=2)[0], 6, "disk")


def test_a_copy_that_has_been_written_to_the_disk_gives_its_place_to_the_next(tmp_path: Path) -> None:
    """One of the two copies since a checkpoint is always whole, also while the other is made."""
    with shared_memory(tmp_path):
        saver = saver_of(tmp_path)
        saver.save_in_background(state(2), Keep(2))
        deadline = time.monotonic() + 30
        while saver.store.steps() != [2]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for step in (3, 4):
            saver.remember(state(step))
        (torn,) = [copy for copy in copies_in(shared_folder(tmp_path)) if copy.step == 4]
        forget_copies([torn])
        target = state(0)
        found = saver.restore_newest(lambda _: target.held)
        assert found is not None and (found.step, found.where) == (3, "memory")
        saver.close()


def test_copies_that_go_while_they_are_read_leave_the_disk(tmp_path: Path) -> None:
    with shared_memory(tmp_path) as shared:
        saver = saver_of(tmp_path)
        saver.save(state(2), Keep(2))
        saver.remember(state(3))
        target = state(0)

        def places(_: object) -> Held:
            for path in shared.path.glob("rank-*/slot-?"):
                path.unlink()
            return target.held

        found = saver.restore_newest(places)
        assert found is not None and (found.step, found.where) == (2, "disk")
        assert torch.equal(target.tensors["model/a"], state(2).tensors["model/a"])  # type: ignore[arg-type]
        saver.close()


def test_back_to_before_a_step_and_what_came_after_is_forgotten(tmp_path: Path, pool: Pool) -> None:
    with shared_memory(tmp_path) as shared:
        pool.run(remember, tmp_path, [3, 4], world=2)
        assert_restored(pool.run(restored, tmp_path, 4, world=2)[0], 3)
        assert {copy.step for copy in copies_in(shared.path)} == {3}
        assert pool.run(restored, tmp_path, 3, world=2) == [None, None]


def test_the_copies_of_another_group_are_not_mixed_in(tmp_path: Path, pool: Pool) -> None:
    """Two processes go on from copies of four; a fault comes before both have made theirs."""
    with shared_memory(tmp_path):
        pool.run(remember, tmp_path, [5, 6], world=4)
        pool.run(_one_copy_of_two, tmp_path, world=2)
        assert_restored(pool.run(restored, tmp_path, world=1)[0], 6)


def _one_copy_of_two(run: Path) -> None:
    saver = saver_of(run)
    assert saver.restore_newest(lambda saved: held(None)) is not None
    saver.snapshots.plan_for(held(7))
    if rank() == 0:
        saver.snapshots.copy(7, held(7), {"progress": {}})
    saver.close()


def full(descriptor: int, size: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_copy_that_memory_has_no_room_for_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared_memory(tmp_path) as shared:
        saver = saver_of(tmp_path)
        saver.remember(state(5))
        monkeypatch.setattr(shm_buffers, "allocate", full)
        saver.remember(state(6))
        assert [copy.step for copy in copies_in(shared.path)] == [5]
        saver.remember(state(7))  # in the memory that is there
        assert [copy.step for copy in copies_in(shared.path)] == [7]
        saver.close()


def test_once_there_is_room_again_a_copy_is_made_while_the_other_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared_memory(tmp_path) as shared:
        saver = saver_of(tmp_path)
        saver.remember(state(5))
        with monkeypatch.context() as patch:
            patch.setattr(shm_buffers, "allocate", full)
            saver.remember(state(6))
        snapshots = saver.snapshots
        assert snapshots.plan is not None and snapshots.plan.slots == 1
        snapshots.writer.pending = SimpleNamespace(slot=snapshots.free())  # type: ignore[assignment]
        monkeypatch.setattr(snapshots.writer, "answer", lambda kind, timeout: None)  # it is being written
        more = state(7)
        assert snapshots.take(State(7, {**more.tensors, "model/c": torch.ones(3)}, more.numbers))
        assert sorted(copy.step for copy in copies_in(shared.path)) == [5, 7]
        snapshots.writer.pending = None
        saver.close()


def test_a_copy_that_is_being_written_is_not_overwritten_until_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = [None]
    with shared_memory(tmp_path) as shared:
        saver = saver_of(tmp_path)
        for step in (5, 6):
            saver.remember(state(step))
        snapshots = saver.snapshots
        snapshots.writer.pending = SimpleNamespace(slot=snapshots._newest)  # type: ignore[assignment]
        monkeypatch.setattr(snapshots.writer, "answer", lambda kind, timeout: written[0])
        steps = []
        for step in (7, 8):
            saver.remember(state(step))
            steps.append(sorted(copy.step for copy in copies_in(shared.path)))
        written[0] = {"written": True}
        saver.remember(state(9))
        steps.append(sorted(copy.step for copy in copies_in(shared.path)))
        assert steps == [[6, 7], [6, 8], [8, 9]]
        snapshots.writer.pending = None
        saver.close()


def test_of_two_copies_of_the_newest_step_the_next_node_needs_one(tmp_path: Path) -> None:
    with shared_memory(tmp_path) as shared:
        saver = saver_of(tmp_path)
        for _ in range(2):
            saver.remember(state(5))
        (shared.path / NEIGHBOUR).touch()
        headers = list(shared.path.glob("rank-0/slot-?.json"))
        assert len(headers) == 2
        for header in headers:
            (shared.path / f"{SENT}0").write_text(stamp_of(header))
            assert saver.snapshots.is_safe()
        saver.close()


def test_a_copy_is_safe_if_the_next_node_has_the_newest_one_by_any_clock(tmp_path: Path) -> None:
    with shared_memory(tmp_path) as shared:
        saver = saver_of(tmp_path)
        for step in (5, 6):
            saver.remember(state(step))
        headers = {json.loads(path.read_text())["step"]: path for path in shared.path.glob("rank-0/slot-?.json")}
        os.utime(headers[6], (1, 1))  # the clock was set back between the two
        (shared.path / NEIGHBOUR).touch()
        (shared.path / f"{SENT}0").write_text(stamp_of(headers[5]))
        assert not saver.snapshots.is_safe()
        (shared.path / f"{SENT}0").write_text(stamp_of(headers[6]))
        assert saver.snapshots.is_safe()
        saver.close()


def test_what_fewer_processes_leave_unused_is_given_back(tmp_path: Path, pool: Pool) -> None:
    with shared_memory(tmp_path) as shared:
        pool.run(remember, tmp_path, [1], world=4)
        pool.run(remember, tmp_path, [2], world=2)
        assert sorted(path.name for path in shared.path.glob("rank-*")) == ["rank-0", "rank-1"]


@pytest.mark.parametrize(("times", "slots"), [(1.5, 2), (0.5, 0)])
def test_memory_that_former_ranks_hold_counts_as_room(
    times: float, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy replaces those of former ranks; without room for it, a checkpoint does."""
    with shared_memory(tmp_path) as shared:
        length = make_write_plan(state(1).held, None).length
        former = [shared.path / f"rank-{number}" / "slot-0" for number in (1, 2)]
        for path in former:
            path.parent.mkdir()
            path.write_bytes(bytes(length))

        def free() -> SimpleNamespace:
            held = sum(path.stat().st_size for path in shared.path.glob("rank-*/slot-?"))
            return SimpleNamespace(available=((2 + times) * length - held) / SPARE + 1)

        monkeypatch.setattr(psutil, "virtual_memory", free)
        saver = saver_of(tmp_path)
        snapshots = saver.snapshots
        assert snapshots.plan_for(state(1).held).slots == slots
        saver.remember(state(1))
        assert any(path.exists() for path in former) == (not slots)
        saver.save(state(1), Keep(2))
        assert not any(path.exists() for path in former)
        assert snapshots.plan_for(state(1).held).slots == 2
        saver.close()


def test_without_a_supervisor_there_are_no_copies(tmp_path: Path) -> None:
    saver = saver_of(tmp_path)
    assert not shared_folder(tmp_path).exists() and not saver.cadence.due(1)
    assert steps_in_memory(None, None) == []
    saver.close()


DYING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from states import state
from test_memory_copies import saver_of
saver = saver_of(Path(sys.argv[1]))
for step in (1, 2, 3):
    saver.remember(state(step))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_copy_outlives_its_process(tmp_path: Path) -> None:
    with shared_memory(tmp_path):
        command = [sys.executable, "-c", DYING, str(tmp_path), str(Path(__file__).parent)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        saver = saver_of(tmp_path)
        target = state(0)
        found = saver.restore_newest(lambda saved: target.held)
        assert found is not None and (found.step, found.where) == (3, "memory")
        saver.save(State(3, target.tensors, found.numbers), Keep(1))
        assert_saved(saver.store, 3)
        saver.close()


def test_what_the_writer_of_a_killed_process_still_reads_does_not_change(tmp_path: Path) -> None:
    with shared_memory(tmp_path) as shared:
        remember(tmp_path, [1, 2])
        with ExitStack() as stack:
            paths = sorted(shared.path.glob("rank-0/slot-?"))
            files = [stack.enter_context(path.open("rb")) for path in paths]
            mapped = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
            before = [path.read_bytes() for path in paths]
            remember(tmp_path, [3, 4])
            assert [staged[:] for staged in mapped] == before
            assert len(before) == 2 and all(path.read_bytes() not in before for path in paths)


def test_a_state_that_was_restored_from_memory_is_saved_at_the_end(tmp_path: Path) -> None:
    with shared_memory(tmp_path):
        remember(tmp_path, [3])
        with saver_of(tmp_path) as saver:
            target = held(None)
            found = saver.restore_newest(lambda _: target)
            assert found is not None and (found.step, found.where) == (3, "memory")
            saver.finish(State(3, target, found.numbers), Keep(1))
            assert saver.store.steps() == [3]


def test_of_a_step_in_both_places_the_copy_is_read_and_stays(tmp_path: Path) -> None:
    with shared_memory(tmp_path) as shared, saver_of(tmp_path) as saver:
        for step in (2, 3):
            saver.remember(State(step, held(step), {"progress": {"step": step}}))
        told = [(outcome.step, outcome.where, outcome.every) for outcome in saver.finished()]
        assert told == [(2, "memory", 1)]  # the first copy, and changes of the interval
        saver.save(State(3, held(3), {"progress": {"step": 3}}), Keep(9))
        target = held(None)
        for where in ("memory", "disk"):
            found = saver.restore_newest(lambda _: target)
            assert found is not None and (found.step, found.where) == (3, where)
            assert {copy.step for copy in copies_in(shared.path)} == ({2, 3} if where == "memory" else {2})
            forget_copies([copy for copy in copies_in(shared.path) if copy.step == 3])
        saver.remember(State(4, held(4), {"progress": {"step": 4}}))
        assert {copy.step for copy in copies_in(shared.path)} == {2, 4}  # in the place of the one that was removed


def test_no_copy_is_made_before_the_next_node_has_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.checkpoint.saver.node_name", lambda: "a")
    monkeypatch.setattr("stoker.checkpoint.saver.TRIES", 3)
    with shared_memory(tmp_path) as shared, saver_of(tmp_path) as saver:
        saver.remember(state(5))
        (shared.path / NEIGHBOUR).touch()
        assert not saver.snapshots.is_safe()  # nothing has arrived there yet
        saver.remember(state(6))
        assert [copy.step for copy in copies_in(shared.path)] == [5]
        asked: list[int] = []

        def never() -> bool:
            asked.append(1)
            return False

        monkeypatch.setattr(saver.snapshots, "is_safe", never)
        saver.save_in_background(state(7), Keep(1))
        assert len(asked) == 3  # a checkpoint waits for it, and then is made
        saver.wait()
        assert saver.store.steps() == [7]


def test_a_copy_has_no_header_while_its_bytes_change(tmp_path: Path) -> None:
    """A process that dies in between leaves no copy that looks complete."""
    with shared_memory(tmp_path) as shared, saver_of(tmp_path) as saver:
        for step in (1, 2):
            saver.remember(State(step, held(step), {}))
        steps: list[list[int]] = []

        class Noted(Chunk):
            def data(self) -> torch.Tensor:
                steps.append(sorted(copy.step for copy in copies_in(shared.path)))
                return super().data()

        changed = held(3)
        noted = {name: [Noted(c.tensor, c.offsets, c.shape) for c in chunks] for name, chunks in changed.items()}
        saver.snapshots.copy(3, noted, {})
        assert steps and all(complete == [2] for complete in steps)
        assert sorted(copy.step for copy in copies_in(shared.path)) == [2, 3]


def test_a_copy_whose_file_is_too_short_is_none(tmp_path: Path) -> None:
    with shared_memory(tmp_path) as shared:
        remember(tmp_path, [3])
        (copy,) = copies_in(shared.path)
        os.truncate(copy.data, 8 * 96)  # without the second tensor
        assert copies_in(shared.path) == []


def test_memory_that_is_made_again_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with shared_memory(tmp_path) as shared, saver_of(tmp_path) as saver:
            shutil.rmtree(shared.path)
            saver.remember(state(1))
            assert shared.path.stat().st_mode & 0o077 == 0
            assert all(path.stat().st_mode & 0o077 == 0 for path in shared.path.glob("rank-0/slot-?"))
    finally:
        os.umask(before)


def test_files_that_the_writer_may_read_stay_while_another_plan_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared_memory(tmp_path) as shared, saver_of(tmp_path) as saver:
        saver.remember(state(5))
        layouts = set(shared.path.glob("rank-0/file_layout-*"))
        more = State(6, {**state(6).tensors, "model/c": torch.ones(3)}, {})
        writer = saver.snapshots.writer
        writer.pending = SimpleNamespace(slot=saver.snapshots.free())  # type: ignore[assignment]
        monkeypatch.setattr(writer, "answer", lambda kind, timeout: None)  # it has not read them
        saver.snapshots.plan_for(more.held)
        assert layouts and all(path.exists() for path in layouts)
        writer.pending = None
        saver.snapshots.plan_for(state(7).held)
        assert len(list(shared.path.glob("rank-0/file_layout-*"))) == len(layouts)


def test_with_less_memory_the_newest_copy_that_all_have_stays(tmp_path: Path) -> None:
    with shared_memory(tmp_path) as shared, saver_of(tmp_path) as saver:
        for step in (5, 6):
            saver.remember(state(step))
        saver.snapshots._do_with_less()
        assert [copy.step for copy in copies_in(shared.path)] == [6]


def _less_for_one_of_two(run: Path) -> bool:
    """Copies of two steps; of the third one process has no room, after it has taken the oldest copy's place."""
    saver = saver_of(run)
    for step in (5, 6):
        saver.remember(State(step, held(step), {"progress": {"step": step}}))

    def fails(*_: object) -> None:
        slot = saver.snapshots.free()
        assert slot is not None
        slot.header.unlink()
        slot.forget_step()
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank() == 1:
        saver.snapshots.copy = fails  # type: ignore[method-assign]
    taken = saver.snapshots.take(State(7, held(7), {"progress": {"step": 7}}))
    saver.close()
    return taken


def test_a_copy_that_one_process_has_no_room_for_leaves_the_one_that_all_have(tmp_path: Path, pool: Pool) -> None:
    with shared_memory(tmp_path) as shared:
        assert pool.run(_less_for_one_of_two, tmp_path, world=2) == [False, False]
        assert [(copy.rank, copy.step) for copy in copies_in(shared.path)] == [(0, 6), (1, 6)]
        assert_restored(pool.run(restored, tmp_path, world=1)[0], 6)


def test_a_copy_whose_file_was_removed_is_made_in_another(tmp_path: Path) -> None:
    with shared_memory(tmp_path) as shared, saver_of(tmp_path) as saver:
        for step in (5, 6):
            saver.remember(state(step))
        for path in shared.path.glob("rank-0/slot-?"):
            path.unlink()
        saver.remember(state(7))
        assert [copy.step for copy in copies_in(shared.path)] == [7]


def test_with_room_for_one_copy_the_newest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_memory(tmp_path) as shared, saver_of(tmp_path) as saver:
        for step in (6, 5):  # the older one is in the second slot
            saver.snapshots.take(state(step))
        plans = "stoker.checkpoint.snapshots.make_write_plan"
        monkeypatch.setattr(plans, lambda held, folder: replace(make_write_plan(held, folder), slots=1))
        saver.snapshots.plan = None
        assert saver.snapshots.plan_for(state(7).held).slots == 1
        assert [copy.step for copy in copies_in(shared.path)] == [6]


def test_copies_cover_what_all_of_its_boxes_are_in() -> None:
    def copies(*rows: tuple[int, int]) -> MemoryCopies:
        boxes = [Item("w", (6, 2), torch.float32, (first, 0), (last - first, 2), 0) for first, last in rows]
        return MemoryCopies(3, "group", tuple(SimpleNamespace(items=[box]) for box in boxes), {}, {})  # type: ignore[misc]

    def held(first: int, last: int, *shape: int) -> Held:
        return {"w": [Chunk(torch.empty(last - first, 2), (first, 0), shape or (6, 2))]}

    assert copies((0, 3), (3, 6)).covers(held(0, 6)) and copies((0, 3)).covers(held(1, 3))
    assert not copies((0, 3)).covers(held(0, 6)) and not copies((0, 3)).covers(held(2, 4))
    assert not copies((0, 3), (3, 6)).covers(held(0, 6, 8, 2))  # of another tensor
    assert not copies((0, 3)).covers({"v": held(0, 3)["w"]})
