"""Saving and restoring of training states in the format of PyTorch's distributed checkpoint.

A checkpoint is a folder ``step-00000060``: the tensors as torch.distributed.checkpoint writes them, and ``state.json``
with the numbers and with the size and SHA-256 of every file. It becomes visible atomically once all of it is on disk,
so a visible checkpoint is complete. One that is damaged later is detected when it is loaded.

An incremental checkpoint has only the rows of embedding tables that have changed since another one, its base, which
``state.json`` names; the base's rows are read before its own.

Tensors have the names and shapes of the whole model, whatever the layout: each process writes and reads its own chunks,
so that a run can resume under any other layout, and a single process can read everything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.checkpoint.chunks import Chunk, Held
from stoker.checkpoint.dcp_errors import FULL, os_error
from stoker.checkpoint.dcp_file_layout import DcpFilePart
from stoker.checkpoint.dcp_restore import read_checkpoint, read_numbers
from stoker.checkpoint.object_collectives import by_first, rank, run_on_all_ranks
from stoker.checkpoint.owner import check_owner, claim_place
from stoker.checkpoint.retention import Keep, retain
from stoker.checkpoint.save_plan import WritePlan, make_write_plan
from stoker.checkpoint.state import Places, Saved, SaveOutcome, State
from stoker.checkpoint.storage import Storage, base_of, name_of, storage_of
from stoker.checkpoint.tensor_names import POWER_SGD
from stoker.checkpoint.writer import commit, write_part
from stoker.errors import DiskFailed, reason_of
from stoker.runs.run_folder import RunFolder


def place_of(to: str | None, folder: RunFolder, base: Path) -> Path | str:
    """Returns the place of a run's checkpoints: the job's ``checkpoint.to``, a URL or a folder below ``base``, or by
    default a folder in the run's.
    """
    if to is None:
        return folder.checkpoints
    return to if "://" in to else base / to


@dataclass(frozen=True)
class Store:
    """The checkpoints of a run.

    Where torch.distributed is initialised, all methods but `steps`, `pending`, `numbers` and `claim` are
    collectives: every process calls them with the same step, and an error of one is raised on all.

    Attributes:
        folder: a folder, or a URL.
    """

    folder: Path | str

    @property
    def storage(self) -> Storage:
        return storage_of(self.folder)

    def _name(self, step: int) -> str:
        """Returns a checkpoint's name for messages, without checking that it exists."""
        return f"{self.folder}/{name_of(step)}"

    def steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, ascending.

        Raises:
            DiskFailed: the place cannot be used.
        """
        with self._usable():
            return self.storage.steps()

    def pending(self) -> list[int]:
        """Returns the steps that another process of this machine is still writing."""
        with self._usable():
            return self.storage.pending()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Turns errors of the place within the block into `DiskFailed`."""
        try:
            yield
        except OSError as error:
            raise DiskFailed(
                f"{self.folder}, where the checkpoints are, cannot be used ({_reason(error)}). "
                "Make it available and run the same command to continue"
            ) from error

    def numbers(self, step: int) -> dict[str, Any]:
        """Reads a checkpoint's data beside its tensors.

        Raises:
            DamagedError: it has changed since it was written.
        """
        return read_numbers(self.storage, step, where=self._name(step))

    def save(self, state: State, plan: WritePlan | None = None) -> SaveOutcome:
        """Writes a checkpoint; training waits.

        Args:
            plan: the processes' plan, if it exists already.

        Raises:
            RunFailed: the disk is full or cannot be written; earlier checkpoints are untouched.
        """
        begin = time.perf_counter()
        storage, attempt, size = self.storage, None, 0
        held = state.held
        try:
            attempt = begun = by_first(lambda: storage.begin(state.step, os.getpid()))
            if begun is None:  # the step already has a checkpoint
                return SaveOutcome(state.step, "disk", 0.0, 0.0, 0)
            agreed = plan or make_write_plan(held, None)
            parts = run_on_all_ranks(lambda: write_part(storage, begun, agreed.file_layout, _bytes_of(held, agreed)))
            size = by_first(
                lambda: commit(
                    storage,
                    begun,
                    step=state.step,
                    parts=parts,
                    metadata=agreed.metadata,
                    numbers=state.numbers,
                )
            )
        except Exception as error:
            self._give_up(attempt)
            raise self.explain(error, state.step) from error
        except BaseException:  # a second Ctrl-C
            self._give_up(attempt)
            raise
        seconds = time.perf_counter() - begin
        return SaveOutcome(state.step, "disk", seconds, seconds, size)

    def _give_up(self, attempt: str | None) -> None:
        if attempt is not None and rank() == 0:
            with suppress(OSError):  # the place may be what failed; the next start cleans up
                self.storage.give_up(attempt)

    def explain(self, error: Exception, step: int) -> Exception:
        """Converts an error of the disk to `DiskFailed`; returns any other error unchanged."""
        cause = os_error(error)
        if cause is None:
            return error
        full = cause.errno in FULL
        what = "the disk is full" if full else f"the disk cannot be written ({_reason(cause)})"
        try:
            last = self.steps()[-1:]
            safe = f"the checkpoint of step {last[0]} is whole" if last else "there is no other checkpoint"
        except DiskFailed:  # the same fault of the place
            safe = "the earlier ones cannot be read now"
        return DiskFailed(
            f"{what}: the checkpoint of step {step} was not written to {self.folder}; {safe}. "
            f"Make {'room' if full else 'the place available'} and run the same command to continue"
        )

    def load(self, step: int, elsewhere: Places = lambda _saved: {}) -> State:
        """Reads a checkpoint, every tensor whole.

        Args:
            elsewhere: destinations of tensors that are not part of the result.

        Raises:
            DamagedError: it has changed since it was written.
        """
        tensors: dict[str, Tensor] = {}

        def places(saved: Mapping[str, Saved]) -> Held:
            others = elsewhere(saved)
            own = {n: entry for n, entry in saved.items() if n not in others and not n.startswith(POWER_SGD)}
            tensors.update((name, torch.empty(entry.shape, dtype=entry.dtype)) for name, entry in own.items())
            return {**{name: [Chunk.whole(tensor)] for name, tensor in tensors.items()}, **others}

        numbers = self.restore(step, places)
        return State(step, tensors, numbers)

    def restore(self, step: int, places: Places) -> dict[str, Any]:
        """Reads a checkpoint into the chunks that ``places`` returns for its tensors; returns the numbers.

        Raises:
            DamagedError: it has changed since it was written.
            RunFailed: it is of another model.
        """
        return read_checkpoint(self.storage, step, places, where=self._name(step), steps=self.steps)

    def is_whole(self, step: int) -> bool:
        """Returns whether a checkpoint is full, so that it adds to no other."""
        return base_of(self.storage, step) is None

    def put_aside(self, step: int) -> str:
        """Renames a damaged checkpoint, so that it is not listed but can be inspected. Returns its path."""
        with self._usable():
            return by_first(lambda: self.storage.put_aside(step))

    def retain(self, keep: Keep) -> None:
        """Deletes all checkpoints that are not kept."""
        with suppress(OSError):  # those that could not be deleted are deleted after the next checkpoint
            by_first(lambda: retain(self.storage, keep))

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, which the run will repeat."""

        def delete() -> None:
            for later in reversed(self.steps()):  # in this order, none is left without its base
                if later > step:
                    self.storage.delete(later)
            for attempt in self.storage.attempts_after(step):  # of a writer whose process has ended
                self.storage.give_up(attempt)

        with self._usable():
            by_first(delete)

    def clean(self) -> None:
        """Removes the leftovers of killed processes."""
        with self._usable():
            by_first(self.storage.clean)

    def check_owner(self, folder: RunFolder) -> None:
        """Checks that no run but that of a folder, which the caller has locked, writes to this place.

        Raises:
            UserError: another run does, or did.
        """
        with self._usable():
            by_first(lambda: check_owner(self.storage, folder))

    def claim(self, folder: RunFolder) -> None:
        """Records in the place that a run writes to it. Not a collective: rank 0 calls it.

        Raises:
            UserError: another run has recorded it meanwhile.
        """
        with self._usable():
            claim_place(self.storage, folder)


def _reason(error: OSError) -> str:
    return error.strerror or reason_of(error)


def _bytes_of(held: Held, plan: WritePlan) -> Callable[[DcpFilePart], memoryview]:
    """Returns a function that copies the bytes of tensors from their devices one by one."""
    names = {item.at: item.name for item in plan.items if item.length}

    def data(part: DcpFilePart) -> memoryview:
        tensor = held[names[part.at]][0].data().to("cpu").contiguous()
        return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)

    return data
