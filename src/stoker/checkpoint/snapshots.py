"""The copies of a process' part of the training state in shared memory, of which one is written during training."""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.checkpoint.background_writer import BackgroundWriter, PendingWrite
from stoker.checkpoint.chunks import Held
from stoker.checkpoint.dcp_file_layout import DcpFileLayout
from stoker.checkpoint.object_collectives import rank, run_on_all_ranks
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.save_plan import WritePlan, is_plan_valid, make_write_plan
from stoker.checkpoint.shm_buffers import Slot
from stoker.checkpoint.state import State
from stoker.checkpoint.writer import WriteRequest
from stoker.runs.shm_folder import NEIGHBOUR, OWN, SENT, SharedFolder, has_folder, shared_folder, stamp_of


class Snapshots:
    """The copies of a process and its background writer.

    Args:
        run: the run's folder. If the process that started this one made a shared-memory folder for it, copies outlive
            this process; else they end with it.

    Attributes:
        writer: writes a copy to the checkpoints' place.
        plan: plan of the newest copy; None before the first.
    """

    def __init__(self, run: Path) -> None:
        self._folder = shared_folder(run) if has_folder(run) else None
        self.outlives = self._folder is not None
        self.plan: WritePlan | None = None
        self.writer = BackgroundWriter()
        self._slots: list[Slot] = []
        self._newest: Slot | None = None
        self._own: SharedFolder | None = None
        self._removed: weakref.finalize[[], Snapshots] | None = None

    @property
    def folder(self) -> Path:
        """The folder in shared memory: the run's, or a private one that is created on first use."""
        if self._folder is None:
            own = SharedFolder(Path(tempfile.mkdtemp(prefix=OWN, dir=shared_folder(Path()).parent)))
            own.hold()
            self._own, self._folder, self.writer.removes = own, own.path, own
            self._removed = weakref.finalize(self, own.remove)
        return self._folder

    def take(self, state: State) -> bool:
        """Copies the state; returns whether there was room. A collective."""
        held = state.held
        plan = self.plan_for(held)
        if not plan.slots:
            return False
        try:
            run_on_all_ranks(lambda: self.copy(state.step, held, state.numbers))
        except OSError:  # other processes have taken the memory since
            self._do_with_less()
            return False
        self.remove_former()
        return True

    def remove_former(self) -> None:
        """Removes copies of ranks of a larger world, which a copy or a checkpoint of all ranks has replaced."""
        assert self.plan is not None
        former = [
            folder for folder in self.folder.glob("rank-*") if int(folder.name.removeprefix("rank-")) >= self.plan.world
        ]
        for folder in former:
            shutil.rmtree(folder, ignore_errors=True)
        if former and not self.plan.slots:  # there may be room now
            self.plan = None

    def is_safe(self) -> bool:
        """Returns whether the newest copy of this process is also on the next node, or no other node stores copies."""
        if self._folder is None or not (self._folder / NEIGHBOUR).exists():
            return True
        made = {slot: stamp for slot in self._slots if (stamp := stamp_of(slot.header))}
        newest = max((slot.step for slot in made), default=0)
        try:
            sent = (self._folder / f"{SENT}{rank()}").read_text() if made else ""
            return not made or sent in {stamp for slot, stamp in made.items() if slot.step == newest}
        except FileNotFoundError:
            return False

    def plan_for(self, held: Held) -> WritePlan:
        """Returns the plan; a new one if the held chunks have changed or files are missing. A collective."""
        if not is_plan_valid(self.plan, held, intact=self._is_intact()):
            run_on_all_ranks(self._make_folder)
            self.plan = make_write_plan(held, self.folder)
            try:
                run_on_all_ranks(self._prepare)
            except OSError:  # there is no room
                self._do_without()
        assert self.plan is not None
        return self.plan

    def _is_intact(self) -> bool:
        """Returns whether all files still exist: something may clean up the machine's memory."""
        files = (*DcpFileLayout.files(self._file_layout), self._metadata) if self.plan else ()
        return all(path.exists() for path in files) and all(slot.is_there() for slot in self._slots)

    def _make_folder(self) -> None:
        if self.outlives:  # the process that made it holds it
            self.folder.mkdir(mode=0o700, exist_ok=True)
        elif self._own is not None:
            self._own.keep()

    def _prepare(self) -> None:
        """Writes the files that the writer needs, and makes as many slots as there is room for."""
        plan = self.plan
        assert plan is not None
        here = self.folder / f"rank-{rank()}"
        here.mkdir(exist_ok=True)
        if self.writer.pending is None:  # else the writer may be about to read them
            for path in (*here.glob("file_layout-*"), *here.glob("metadata-*")):
                path.unlink()
        plan.file_layout.keep(self._file_layout)
        self._metadata.write_bytes(plan.metadata)
        have = {slot.path for slot in self._slots}
        self._slots += [slot for slot in (Slot(here, number) for number in range(2)) if slot.path not in have]
        self._slots.sort(key=lambda slot: slot.step, reverse=True)  # the newest copy stays where there is room for one
        for slot in self._slots:
            if not slot.is_there():
                slot.close()
        for slot in self._slots[plan.slots :]:
            slot.empty()
        self._slots = self._slots[: plan.slots]

    @property
    def _file_layout(self) -> Path:
        assert self.plan is not None
        return self.folder / f"rank-{rank()}" / f"file_layout-{self.plan.group}"

    @property
    def _metadata(self) -> Path:
        return self._file_layout.with_name(self._file_layout.name.replace("file_layout", "metadata"))

    def free(self) -> Slot | None:
        """Returns the slot for the next copy: of those that are not being written, the one with the older copy."""
        pending = self.writer.pending
        writing = pending.slot if pending is not None and self.writer.answer("written", timeout=0.0) is None else None
        slots = [slot for slot in self._slots if slot is not writing]
        return min(slots, key=lambda slot: slot.step, default=None)

    def copy(self, step: int, held: Held, numbers: Mapping[str, Any]) -> None:
        """Copies this process' part of the state.

        Raises:
            OSError: free memory has been taken by another process.
        """
        slot = self.free()
        assert self.plan is not None and slot is not None
        slot.fill(step, held, numbers, self.plan, rank=rank())
        self._newest = slot

    def is_settled(self) -> bool:
        """Returns whether the next copy needs no new memory."""
        slot = self.free()
        return slot is not None and self.plan is not None and slot.group == self.plan.group

    def _do_with_less(self) -> None:
        """Keeps the newest copy that all processes have, as the only one; disables copies without any. A collective."""
        assert self.plan is not None
        made = run_on_all_ranks(lambda: {slot.step for slot in self._slots if slot.step >= 0})
        if not (common := set.intersection(*made)):
            self._do_without()
            return
        self.plan = replace(self.plan, slots=1)
        kept = next(slot for slot in self._slots if slot.step == max(common))
        for slot in self._slots:
            if slot is not kept:
                slot.empty()
        self._slots = [kept]

    def _do_without(self) -> None:
        """Disables copies until there is another plan."""
        assert self.plan is not None
        self.plan = replace(self.plan, slots=0)
        for slot in self._slots:
            slot.empty()
        self._slots = []

    def forget_steps(self) -> None:
        """Invalidates the cached steps of the slots, as another process has changed the copies."""
        for slot in self._slots:
            slot.forget_step()

    def write(
        self, attempt: str, state: State, *, place: Path | str, keep: Keep, begun: float, deleted: tuple[int, ...]
    ) -> None:
        """Has the newest copy, which is of ``state``, written as an attempt of `Storage.begin`."""
        assert self.plan is not None and self._newest is not None
        request = WriteRequest(
            place=str(place),
            attempt=attempt,
            step=state.step,
            rank=rank(),
            world=self.plan.world,
            data=str(self._newest.path),
            file_layout=str(self._file_layout),
            metadata=str(self._metadata) if rank() == 0 else "",
            numbers=state.numbers,
            keep=keep,
        )
        pending = PendingWrite(
            step=state.step,
            place=place,
            attempt=attempt,
            slot=self._newest,
            begun=begun,
            stall=time.time() - begun,
            deleted=deleted,
        )
        self.writer.write(request, pending)

    def close(self, *, wait: bool) -> None:
        """Ends the writer after its work is done, and frees the memory; copies that outlive this process stay."""
        was_started = self.writer.close(wait=wait)
        for slot in self._slots:
            slot.close()
        self._slots, self._newest, self.plan = [], None, None
        if self._own is not None:
            assert self._removed is not None
            if was_started:  # it removes the folder
                self._removed.detach()
                self._own.release()
            else:
                self._removed()
            self._folder = self._own = self.writer.removes = None
