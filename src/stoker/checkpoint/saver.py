"""How a run is saved while it trains, and from where it goes on: checkpoints in the background, copies in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from stoker.checkpoint.collective import by_first, rank, together
from stoker.checkpoint.copy_interval import Cadence
from stoker.checkpoint.dcp_errors import FULL, os_error
from stoker.checkpoint.disk_space import make_room
from stoker.checkpoint.memory_restore import forget_after, remembered
from stoker.checkpoint.restore_newest import restore_newest
from stoker.checkpoint.save_plan import Agreement, agree
from stoker.checkpoint.staging import Staging
from stoker.checkpoint.state import Damaged, Places, Restored, SaveOutcome, State
from stoker.checkpoint.storage import Keep
from stoker.checkpoint.store import Store
from stoker.errors import DiskFailed, RunFailed

VISIBLE = 120.0  # seconds in which a file that another machine has written is seen on this one


class Saver:
    """Saves a run and restores it. All methods but `finished`, `due` and `close` are collective.

    Args:
        staging: what copies are made in; None for none.
        background: whether checkpoints are written while training goes on.
        memory: steps between copies in memory; 0 for none, None for as many as cost little.
    """

    def __init__(
        self, store: Store, staging: Staging | None = None, *, background: bool = True, memory: int | None = 0
    ) -> None:
        self.store, self.staging = store, staging
        self._background = background and staging is not None
        outlives = staging is not None and staging.outlives
        self.cadence = Cadence(memory if outlives else 0)
        self._outcomes: list[SaveOutcome] = []
        self._was_full = False  # whether the last checkpoint did not fit
        self._told: int | None = None  # step whose outcome is known before it was waited for
        self._cost: float | None = None  # seconds of the last copy in memory

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save(self, state: State, keep: Keep) -> None:
        """Writes a checkpoint, after the one that is being written, and deletes what is not kept.

        Raises:
            DiskFailed: it could not be written; earlier checkpoints are untouched, but for those that gave way to it.
        """
        self.wait()
        begin = time.perf_counter()
        agreed = self.staging.agreed(state.held) if self.staging else agree(state.held, None)
        deleted = self._room_for(state, agreed, keep)
        try:
            outcome = self.store.save(state, agreed)
        except DiskFailed as error:
            cause = os_error(error)
            if cause is None or cause.errno not in FULL:
                raise
            deleted += self._room_for(state, agreed, keep, was_full=True)
            outcome = self.store.save(state, agreed)
        self._was_full = False
        self.store.retain(keep)
        if outcome.bytes:
            seconds = time.perf_counter() - begin
            self._outcomes.append(replace(outcome, seconds=seconds, stall=seconds, deleted=deleted))

    def keep_in_memory(self, state: State) -> bool:
        """Copies the state to where it outlives this process; says whether there was room for it."""
        return self.staging is not None and self.staging.outlives and self._copied(self.staging, state)

    def _room_for(self, state: State, agreed: Agreement, keep: Keep, *, was_full: bool = False) -> tuple[int, ...]:
        """Deletes older checkpoints where the disk has no room for another; gives their steps. A collective.

        The newest one goes only once a copy of the state is where it outlives this process.

        Raises:
            DiskFailed: there is too little room all the same.
        """

        def make(*, replaces: bool) -> tuple[int, ...]:
            size, storage = agreed.size + len(agreed.metadata), self.store.storage
            return by_first(lambda: make_room(storage, state.step, size, keep, replaces=replaces, was_full=was_full))

        try:
            try:
                return make(replaces=False)
            except OSError:
                if not self.keep_in_memory(state):
                    raise
                return make(replaces=True)
        except OSError as error:
            raise self.store.explain(error, state.step) from error

    def save_in_background(self, state: State, keep: Keep) -> None:
        """Copies the state and has the copy written while training goes on, if the job has it so.

        It waits for the checkpoint before, should that still be written: so a job is saved as often as it says, and
        no more than two copies are ever held. Where memory has no room for a copy, or the disk had none for the
        checkpoint before, it saves as `save` does.

        Raises:
            DiskFailed: the place for the checkpoint cannot be written at all. What goes wrong later `finished` tells.
        """
        begin = time.time()
        self.wait()
        staging = self.staging
        if staging is None or not self._background or self._was_full or not self._copied(staging, state):
            return self.save(state, keep)
        assert staging.agreement is not None
        self.cadence.made(state.step, [])
        deleted = self._room_for(state, staging.agreement, keep)
        storage = self.store.storage
        try:
            attempt = by_first(lambda: storage.begin(state.step, staging.writer.pid))
        except OSError as error:
            raise self.store.explain(error, state.step) from error
        if attempt is not None:
            staging.write(
                place=self.store.folder,
                attempt=attempt,
                step=state.step,
                numbers=state.numbers,
                keep=keep,
                begun=begin,
                deleted=deleted,
            )
        return None

    def _copied(self, staging: Staging, state: State) -> bool:
        """Makes a copy; says whether there was room for it."""
        held = state.held
        if not staging.agreed(held).slots:
            return False
        try:
            together(lambda: staging.copy(state.step, held, state.numbers))
        except OSError:  # others have taken the memory since
            staging.do_without()
            return False
        staging.forget_other_ranks()
        return True

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is there, or has failed."""
        staging = self.staging
        if staging is None or staging.pending is None:
            return
        pending = staging.pending
        said = together(lambda: staging.answer("written"))
        failed = next((answer for answer in said if "error" in answer), None)

        def end() -> dict[str, Any]:
            if failed is not None:
                staging.writer.give_up()
            answer = staging.answer("committed", timeout=VISIBLE)
            if answer is not None:
                return failed or answer
            staging.writer.kill()
            self.store.storage.give_up(pending.attempt)
            words = (
                f"what another machine has written to {self.store.folder} cannot be seen on this one: "
                "checkpoint.to must be a folder that all machines share"
            )
            return {"error": words, "errno": 0, "at": time.time()}

        answer = by_first(end)
        self._was_full = answer.get("errno") in FULL
        self._tell(answer)
        staging.pending, self._told = None, None

    def finished(self) -> list[SaveOutcome]:
        """What has been saved, or could not be, and was not told yet; rank 0 knows it as soon as it is so."""
        staging = self.staging
        if staging is not None and staging.pending is not None and rank() == 0:
            answer = staging.answer("committed", timeout=0.0)
            if answer is not None:
                self._tell(answer)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _tell(self, answer: Mapping[str, Any]) -> None:
        assert self.staging is not None and self.staging.pending is not None
        pending = self.staging.pending
        if self._told == pending.step:
            return
        self._told = pending.step
        error = None
        if "error" in answer:
            words, code = answer["error"], answer["errno"]
            explained = self.store.explain(OSError(code, words) if code else RunFailed(words), pending.step)
            error = explained if isinstance(explained, RunFailed) else RunFailed(words)
        seconds = max(answer["at"] - pending.begun, pending.stall)  # it may be written before asking has returned
        size = answer.get("committed", 0)
        outcome = SaveOutcome(pending.step, "disk", seconds, pending.stall, size, deleted=pending.deleted, error=error)
        self._outcomes.append(outcome)

    # -- copies in memory ------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether a copy in memory is to be made after this step; to be asked right after every step."""
        return self.cadence.due(step)

    def begin_step(self) -> None:
        """To be told before every step."""
        self.cadence.begin_step()

    def remember(self, state: State) -> None:
        """Copies the state into memory that outlives this process, unless all of it is being written."""
        begin = time.perf_counter()
        staging = self.staging
        assert staging is not None
        before = staging.agreement
        agreement = staging.agreed(state.held)
        known = agreement is before and staging.is_settled()
        if not agreement.slots or (agreement.slots == 1 and staging.pending is not None):
            self.cadence.made(state.step, [])
            return
        if not self._copied(staging, state):
            return
        costs = together(lambda: (self._cost, self.cadence.step_seconds))
        changed = self.cadence.made(state.step, costs)
        seconds = time.perf_counter() - begin
        if changed or before is None:
            every, size = self.cadence.every, agreement.length
            self._outcomes.append(SaveOutcome(state.step, "memory", seconds, seconds, size, every))
        self._cost = seconds if known else None

    # -- going on --------------------------------------------------------------------------------------------

    def has_state(self) -> bool:
        """Whether there is any state to go back to."""
        self.wait()
        return bool(remembered(self._memory, None)) or by_first(lambda: bool(self.store.steps()))

    @property
    def _memory(self) -> Path | None:
        return self.staging.folder if self.staging is not None and self.staging.outlives else None

    def restore_newest(
        self,
        places: Places,
        *,
        before: int | None = None,
        on_damage: Callable[[Damaged], None] = lambda _: None,
    ) -> Restored | None:
        """Restores the newest state, from memory where its copies are there, or else from the disk.

        A damaged checkpoint is put aside, and the one before it is taken. What is newer than the state that is
        restored is forgotten, as the run will take those steps another time.

        Args:
            before: only states of steps before this one.
            on_damage: is told of a checkpoint that cannot be read.

        Returns:
            None where there is none.

        Raises:
            RunFailed: there are checkpoints, and none of them can be read; or they are of another model.
        """
        self.wait()
        restored = restore_newest(self.store, self._memory, places, before=before, on_damage=on_damage)
        if restored is not None:
            self._forget_after(restored.step)
        return restored

    def _forget_after(self, step: int) -> None:
        if self.staging is not None and self._memory is not None:
            forget_after(self._memory, step)
            self.staging.forget_steps()
        self.store.forget_after(step)

    def close(self) -> None:
        """Ends the background writer, once it is done."""
        if self.staging is not None:
            self.staging.close(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error the writer is left to finish by itself."""
        if self.staging is not None:
            self.staging.close(wait=kind is None)
