"""Saving and restoring of a run: background checkpoints, in-memory copies, and their events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from stoker.checkpoint.background_writer import PendingWrite
from stoker.checkpoint.copy_interval import CopyInterval
from stoker.checkpoint.dcp_errors import FULL, os_error
from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.disk_space import make_room
from stoker.checkpoint.memory_restore import forget_after, steps_in_memory
from stoker.checkpoint.object_collectives import by_first, rank, run_on_all_ranks
from stoker.checkpoint.restore_newest import restore_newest
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.save_plan import WritePlan
from stoker.checkpoint.snapshots import Snapshots
from stoker.checkpoint.state import Damaged, Places, Restored, SaveOutcome, State
from stoker.checkpoint.storage import BASE
from stoker.errors import DiskFailed, RunFailed
from stoker.runs.shm_folder import node_name

AGAIN, TRIES = 0.05, 600  # seconds between polls whether the next node has a copy, and their number


class Saver:
    """Saves and restores a run. All methods but `finished` and `close` are collectives.

    Attributes:
        cadence: says after which steps an in-memory copy is due.
        stall: seconds that training has waited for checkpoints and copies; the loop resets it to 0.

    Args:
        snapshots: makes the in-memory copies.
        background: whether checkpoints are written during training.
        memory: steps between in-memory copies; 0 for none, None for an interval at which they cost little.
        event: records an event, with its name and its values.
        note: prints a line for the user.
    """

    def __init__(
        self,
        store: Store,
        snapshots: Snapshots,
        *,
        background: bool = True,
        memory: int | None = 0,
        event: Callable[..., None] = lambda _name, **_values: None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.store, self.snapshots, self._event, self._note = store, snapshots, event, note
        self._background = background
        self.cadence = CopyInterval(memory if snapshots.outlives else 0)
        self.stall = 0.0
        self._saved: int | None = None  # newest step whose checkpoint exists or is being written
        self._outcomes: list[SaveOutcome] = []
        self._was_full = False  # whether the last checkpoint did not fit
        self._cost: float | None = None  # seconds of the last copy in memory
        self._abandoned: int | None = None  # step after which checkpoints are still to be deleted

    def attempt(self, state: State, keep: Keep) -> None:
        """Saves in the background. An error becomes an event and does not end the run: the next checkpoint may
        succeed.
        """
        with self._stalled():
            try:
                self.save_in_background(state, keep)
                self._saved = state.step
            except RunFailed as error:
                self._report_failure(state.step, error)

    def finish(self, state: State, keep: Keep, whole: Callable[[], State] | None = None) -> None:
        """Saves the final state, unless it is saved already.

        Args:
            whole: returns the same state without a base, where ``state`` may add to one: only such a state is kept in
                memory.

        Raises:
            DiskFailed: it could not be written; it is in memory that outlives this process, if there was room.
        """
        with self._stalled():
            self.wait()
            self.report()
            if self._saved != state.step:
                try:
                    self.save(state, keep)
                except DiskFailed:
                    self.keep_in_memory(whole() if whole is not None else state)
                    raise
                self._saved = state.step
                self.report()

    def save(self, state: State, keep: Keep) -> None:
        """Writes a checkpoint after the pending one, and deletes those that are not kept.

        Raises:
            DiskFailed: it could not be written; earlier checkpoints are untouched, except those deleted to make room.
        """
        self.wait()
        self._forget_abandoned()
        begin = time.perf_counter()
        plan = self.snapshots.plan_for(state.held)
        deleted = self._room_for(state, plan, keep)
        try:
            outcome = self.store.save(state, plan)
        except DiskFailed as error:
            cause = os_error(error)
            if cause is None or cause.errno not in FULL:
                raise
            deleted += self._room_for(state, plan, keep, was_full=True)
            outcome = self.store.save(state, plan)
        self._was_full = False
        if not plan.slots:
            self.snapshots.remove_former()
        self.store.retain(keep)
        if outcome.bytes:
            seconds = time.perf_counter() - begin
            self._outcomes.append(replace(outcome, seconds=seconds, stall=seconds, deleted=deleted))

    def is_whole(self, step: int) -> bool:
        """Returns whether the disk has a full checkpoint of this step to add to; waits for a pending one."""
        with self._stalled():
            self.wait()
            try:
                return by_first(lambda: step in self.store.steps() and self.store.is_whole(step))
            except (DiskFailed, OSError):  # the save that follows reports it
                return False

    def pause(self, state: State, keep: Keep) -> None:
        """Leaves the state for other processes to resume from in memory, or on disk if memory has no room.

        Raises:
            DiskFailed: it could not be written.
        """
        with self._stalled():
            self.wait()
            self.report()
            if self.keep_in_memory(state):
                return
        self.finish(state, keep)

    def keep_in_memory(self, state: State) -> bool:
        """Copies the state into memory that outlives this process; returns whether there was room."""
        fits = not state.streams and BASE not in state.numbers
        return self.snapshots.outlives and fits and self.snapshots.take(state)

    def _room_for(self, state: State, plan: WritePlan, keep: Keep, *, was_full: bool = False) -> tuple[int, ...]:
        """Deletes older checkpoints where the disk has no room for a new one; returns their steps. A collective.

        The newest one is deleted only after the state has been copied into memory that outlives this process.

        Raises:
            DiskFailed: there is too little room even so.
        """
        size, base = plan.size + len(plan.metadata), state.numbers.get(BASE)
        make = partial(make_room, self.store.storage, state.step, size, keep, was_full=was_full, base=base)
        try:
            try:
                return by_first(partial(make, replaces=False))
            except OSError:
                if not self.keep_in_memory(state):
                    raise
                return by_first(partial(make, replaces=True))
        except OSError as error:
            raise self.store.explain(error, state.step) from error

    def save_in_background(self, state: State, keep: Keep) -> None:
        """Copies the state and has the copy written during training, if the job says so.

        It waits for a pending checkpoint first: so the job is saved as often as it says, and there are never more than
        two copies. Where memory has no room for a copy, or the disk had none for the previous checkpoint, it works as
        `save`.

        Raises:
            DiskFailed: nothing can be written to the checkpoints' place. `finished` reports later errors.
        """
        begun = time.time()
        self.wait()
        self._forget_abandoned()
        snapshots, store = self.snapshots, self.store
        self._is_safe(tries=TRIES)
        if not self._background or self._was_full or state.streams or not snapshots.take(state):
            return self.save(state, keep)
        assert snapshots.plan is not None
        self.cadence.made(state.step, [])
        deleted = self._room_for(state, snapshots.plan, keep)
        try:
            attempt = by_first(lambda: store.storage.begin(state.step, snapshots.writer.pid))
        except OSError as error:
            raise store.explain(error, state.step) from error
        if attempt is not None:
            snapshots.write(attempt, state, place=store.folder, keep=keep, begun=begun, deleted=deleted)
        return None

    def wait(self) -> None:
        """Waits until the pending checkpoint is committed or has failed."""
        writer = self.snapshots.writer
        if writer.pending is not None:
            answer = writer.outcome()
            self._was_full = answer.get("errno") in FULL
            self._settle(writer.pending, answer)
            writer.pending = None

    def finished(self) -> list[SaveOutcome]:
        """Returns the checkpoints that were saved or failed since the last call; rank 0 learns of each immediately."""
        writer = self.snapshots.writer
        if writer.pending is not None and rank() == 0:
            answer = writer.answer("committed", timeout=0.0)
            if answer is not None:
                self._settle(writer.pending, answer)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _settle(self, pending: PendingWrite, answer: Mapping[str, Any]) -> None:
        """Records the writer's reply about the pending checkpoint, once."""
        if pending.reported:
            return
        pending.reported = True
        error = None
        if "error" in answer:
            words, code = answer["error"], answer["errno"]
            explained = self.store.explain(OSError(code, words) if code else RunFailed(words), pending.step)
            error = explained if isinstance(explained, RunFailed) else RunFailed(words)
        seconds = max(answer["at"] - pending.begun, pending.stall)  # it may be written before the request has returned
        size = answer.get("committed", 0)
        outcome = SaveOutcome(pending.step, "disk", seconds, pending.stall, size, deleted=pending.deleted, error=error)
        self._outcomes.append(outcome)

    def remember(self, state: State) -> None:
        """Copies the state into memory that outlives this process, unless all copies are being written.

        With several nodes the next node stores each copy too; no further copy is made until it has the last one.
        """
        snapshots = self.snapshots
        if state.streams:
            self.cadence.stop()
            return
        with self._stalled():
            begin = time.perf_counter()
            if not self._is_safe():
                return
            before = snapshots.plan
            plan = snapshots.plan_for(state.held)
            known = plan is before and snapshots.is_settled()
            if not plan.slots or (plan.slots == 1 and snapshots.writer.pending is not None):
                self.cadence.made(state.step, [])
                return
            if not snapshots.take(state):
                return
            costs = run_on_all_ranks(lambda: (self._cost, self.cadence.step_seconds))
            changed = self.cadence.made(state.step, costs)
            seconds = time.perf_counter() - begin
            if changed or before is None:
                every, size = self.cadence.every, plan.length
                self._outcomes.append(SaveOutcome(state.step, "memory", seconds, seconds, size, every))
            self._cost = seconds if known else None

    def _is_safe(self, *, tries: int = 1) -> bool:
        """Returns whether the next nodes have the newest copies of all processes. A collective.

        Args:
            tries: polls, `AGAIN` seconds apart, before it returns False.
        """
        if not node_name():
            return True
        for left in range(tries - 1, -1, -1):
            if all(run_on_all_ranks(self.snapshots.is_safe)):
                return True
            time.sleep(AGAIN if left else 0.0)
        return False

    def has_state(self) -> bool:
        """Returns whether there is any state to restore."""
        self.wait()
        return bool(steps_in_memory(self._memory, None)) or by_first(lambda: bool(self.store.steps()))

    @property
    def _memory(self) -> Path | None:
        return self.snapshots.folder if self.snapshots.outlives else None

    def restore_newest(self, places: Places, *, before: int | None = None) -> Restored | None:
        """Restores the newest state, from memory if its copies are complete, or else from disk.

        A damaged checkpoint is set aside, and the one before it is restored. States newer than the restored one are
        deleted, as the run will repeat those steps.

        Args:
            before: only states of steps before this one.

        Returns:
            None if there is none.

        Raises:
            RunFailed: checkpoints exist, but none can be read; or they are of another model.
        """
        self.wait()
        restored = restore_newest(self.store, self._memory, places, before=before, on_damage=self._report_damage)
        if restored is not None:
            if self._memory is not None:
                forget_after(self._memory, restored.step)
                self.snapshots.forget_steps()
            self._abandoned = restored.step
            try:
                self._forget_abandoned()
            except DiskFailed as error:  # the next save tries again
                if before is None or restored.where != "memory":
                    raise
                self._note(f"{error}. Training goes on from the copies in memory")
        self._saved = restored.step if restored is not None and restored.where == "disk" else None
        return restored

    def _forget_abandoned(self) -> None:
        """Deletes the checkpoints of steps that the run repeats."""
        if self._abandoned is not None:
            self.store.forget_after(self._abandoned)
            self._abandoned = None

    def report(self) -> None:
        """Records the results of `finished` as events."""
        for done in self.finished():
            if done.error is not None:
                self._report_failure(done.step, done.error)
                continue
            values = {"seconds": round(done.seconds, 4), "stall": round(done.stall, 4), "bytes": done.bytes}
            more: dict[str, Any] = {"every": done.every} if done.every is not None else {}
            more |= {"deleted": done.deleted} if done.deleted else {}
            self._event("saved", step=done.step, **values, where=done.where, **more)
            if done.deleted:
                gone = f"the checkpoint of step {', '.join(map(str, done.deleted))}"
                self._note(f"the disk is nearly full: {gone} was deleted to make room for that of step {done.step}")

    def _report_failure(self, step: int, error: RunFailed) -> None:
        self._saved = None if self._saved == step else self._saved
        self._event("save_failed", step=step, error=str(error))
        self._note(f"{error}. Training goes on; it is tried again with the next checkpoint")

    def _report_damage(self, damaged: Damaged) -> None:
        self._event("damaged", step=damaged.step, error=str(damaged.error), aside=damaged.aside)
        self._note(f"{damaged.error}; renamed to {damaged.aside}; the previous checkpoint is used")

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stall += time.perf_counter() - begin

    def close(self) -> None:
        """Ends the background writer after its work is done."""
        self.__exit__(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the saver; after an error the writer finishes on its own."""
        self.snapshots.close(wait=kind is None)
