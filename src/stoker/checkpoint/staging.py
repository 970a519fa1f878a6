"""The background side of saving, as the training process has it: copies in shared memory, and who writes them."""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

from stoker.checkpoint.chunks import Held
from stoker.checkpoint.collective import rank, together
from stoker.checkpoint.save_plan import Agreement, agree, unchanged
from stoker.checkpoint.shm_buffers import Slot
from stoker.checkpoint.storage import Keep
from stoker.checkpoint.writer import WriteRequest
from stoker.checkpoint.writer_process import Background
from stoker.runs.shm_folder import PREFIX, SharedFolder, has_folder, shared_folder


@dataclass
class Pending:
    """A checkpoint that is being written in the background.

    Attributes:
        attempt: as `Storage.begin` gave it.
        slot: of the copy that it is written from.
        begun: when its saving began, seconds since 1970.
        stall: seconds that training stood still for it.
        deleted: checkpoints that were deleted before, to make room for it.
        answers: what the writer has said of it.
    """

    step: int
    attempt: str
    slot: Slot
    begun: float
    stall: float
    deleted: tuple[int, ...]
    answers: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, *kinds: str) -> dict[str, Any] | None:
        """What the writer has said of one of these kinds."""
        return next((answer for answer in self.answers if not {*kinds}.isdisjoint(answer)), None)


class Staging:
    """A process' copies and its background writer.

    Args:
        run: the run's folder. Where whoever started this process has made it a folder in shared memory, copies
            outlive the process; else they are its own and end with it.
    """

    def __init__(self, run: Path | None = None) -> None:
        self._folder = shared_folder(run) if run is not None and has_folder(run) else None
        self.outlives = self._folder is not None
        self.agreement: Agreement | None = None
        self.pending: Pending | None = None
        self._writer: Background | None = None
        self._slots: list[Slot] = []
        self._newest: Slot | None = None
        self._own: SharedFolder | None = None
        self._removed: weakref.finalize[[], Staging] | None = None

    @property
    def folder(self) -> Path:
        """In shared memory, of the copies of all processes; or of this process' own, made when it is first needed."""
        if self._folder is None:
            own = SharedFolder(Path(tempfile.mkdtemp(prefix=PREFIX, dir=shared_folder(Path()).parent)))
            own.hold()
            self._own, self._folder = own, own.path
            self._removed = weakref.finalize(self, own.remove)
        return self._folder

    @property
    def writer(self) -> Background:
        """The background process, started when it is first needed."""
        if self._writer is None or not self._writer.is_alive():
            self._writer = Background(self._own)
        return self._writer

    def agreed(self, held: Held) -> Agreement:
        """Who writes what; agreed on again where what is held has changed, or files are gone. A collective."""
        if not unchanged(self.agreement, held, intact=self._is_intact()):
            together(self._make_folder)
            self.agreement = agree(held, self.folder)
            try:
                together(self._prepare)
            except OSError:  # there is no room
                self.do_without()
        assert self.agreement is not None
        return self.agreement

    def _is_intact(self) -> bool:
        """Whether all files are where they were left: something may clean up the machine's memory."""
        return self.agreement is None or (
            self._envelope.exists()
            and self._envelope.with_suffix(".words").exists()
            and self._metadata.exists()
            and all(slot.is_there() for slot in self._slots)
        )

    def _make_folder(self) -> None:
        if self.outlives:  # whoever made it holds it
            self.folder.mkdir(mode=0o700, exist_ok=True)
        elif self._own is not None:
            self._own.keep()

    def _prepare(self) -> None:
        """Leaves what the writer needs, and makes as many slots as there is room for."""
        agreement = self.agreement
        assert agreement is not None
        here = self.folder / f"rank-{rank()}"
        here.mkdir(exist_ok=True)
        if self.pending is None:  # else the writer may be about to read them
            for path in (*here.glob("envelope-*"), *here.glob("metadata-*")):
                path.unlink()
        agreement.envelope.keep(self._envelope)
        self._metadata.write_bytes(agreement.metadata)
        self._slots = self._slots or [Slot(here, number) for number in range(2)]
        for slot in self._slots:
            if not slot.is_there():
                slot.close()
        for slot in self._slots[agreement.slots :]:
            slot.empty()
        self._slots = self._slots[: agreement.slots]

    @property
    def _envelope(self) -> Path:
        assert self.agreement is not None
        return self.folder / f"rank-{rank()}" / f"envelope-{self.agreement.group}"

    @property
    def _metadata(self) -> Path:
        return self._envelope.with_name(self._envelope.name.replace("envelope", "metadata"))

    def free(self) -> Slot | None:
        """The slot for the next copy: of those that are not being written, the one whose copy is older."""
        writing = (
            self.pending.slot if self.pending is not None and self.answer("written", timeout=0.0) is None else None
        )
        slots = [slot for slot in self._slots if slot is not writing]
        return min(slots, key=lambda slot: slot.step, default=None)

    def copy(self, step: int, held: Held, numbers: Mapping[str, Any]) -> None:
        """Makes a copy of this process' part of the state.

        Raises:
            OSError: memory that there was room in has been taken.
        """
        assert self.agreement is not None
        slot = self.free()
        assert slot is not None
        slot.fill(step, held, numbers, self.agreement, rank=rank())
        self._newest = slot

    def is_settled(self) -> bool:
        """Whether the next copy needs no new room."""
        slot = self.free()
        return slot is not None and self.agreement is not None and slot.group == self.agreement.group

    def do_without(self) -> None:
        """Makes no copies any more, until the processes agree anew."""
        assert self.agreement is not None
        self.agreement = replace(self.agreement, slots=0)
        for slot in self._slots:
            slot.empty()
        self._slots = []

    def write(
        self,
        *,
        place: Path | str,
        attempt: str,
        step: int,
        numbers: dict[str, Any],
        keep: Keep,
        begun: float,
        deleted: tuple[int, ...] = (),
    ) -> None:
        """Has the newest copy written in the background, as an attempt of `Storage.begin`."""
        assert self.agreement is not None and self._newest is not None
        request = WriteRequest(
            str(place),
            isinstance(place, str),
            attempt,
            step,
            rank(),
            self.agreement.world,
            str(self._newest.path),
            str(self._envelope),
            str(self._metadata) if rank() == 0 else "",
            numbers,
            keep,
        )
        self.writer.ask(request)
        self.pending = Pending(step, attempt, self._newest, begun, time.time() - begun, deleted)

    @overload
    def answer(self, kind: str) -> dict[str, Any]: ...
    @overload
    def answer(self, kind: str, *, timeout: float) -> dict[str, Any] | None: ...
    def answer(self, kind: str, *, timeout: float | None = None) -> dict[str, Any] | None:
        """What the writer says of the checkpoint it is at: an answer of a kind, or an error.

        Args:
            timeout: seconds to wait for it; None for as long as it takes.
        """
        pending, writer = self.pending, self._writer
        assert pending is not None and writer is not None
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if (found := pending.answer(kind, "error")) is not None:
                return found
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            answers = writer.answers(left)
            pending.answers += [answer for answer in answers if answer["step"] == pending.step]
            if not answers and left == 0.0:
                return None
            if not answers and not writer.is_alive():
                words = f"the background writer ended with exit code {writer.process.returncode}"
                pending.answers.append({"error": words, "errno": 0, "at": time.time()})

    def forget_other_ranks(self) -> None:
        """Removes copies of ranks that there are no more, once all of the others have made theirs."""
        assert self.agreement is not None
        for folder in self.folder.glob("rank-*"):
            if int(folder.name.removeprefix("rank-")) >= self.agreement.world:
                shutil.rmtree(folder, ignore_errors=True)

    def forget_steps(self) -> None:
        """The copies were changed by another process: which is older is looked up again."""
        for slot in self._slots:
            slot.forget_step()

    def close(self, *, wait: bool) -> None:
        """Ends the writer, once it has finished, and lets the memory go; copies that outlive this process stay."""
        removed_by_writer = self._writer is not None
        if self._writer is not None:
            self._writer.close(wait=wait)
            self._writer = None
        for slot in self._slots:
            slot.close()
        self._slots, self._newest, self.agreement, self.pending = [], None, None, None
        if self._own is not None:
            assert self._removed is not None
            if removed_by_writer:
                self._removed.detach()
                self._own.release()
            else:
                self._removed()
            self._folder = self._own = None
