"""The process that writes checkpoints from shared memory during training, and the one that it is writing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stoker.checkpoint.object_collectives import by_first, run_on_all_ranks
from stoker.checkpoint.shm_buffers import Slot
from stoker.checkpoint.storage import storage_of
from stoker.checkpoint.writer import GIVE_UP, WriteRequest
from stoker.files import has_input
from stoker.runs.shm_folder import SharedFolder

VISIBLE = 120.0  # seconds until a file written by another machine must be visible on this one
DELETES = 300.0  # seconds until old checkpoints are deleted; with `VISIBLE` less than the watchdog allows a save
ENDS = 600.0  # seconds that the process gets to finish when this one ends


@dataclass
class PendingWrite:
    """A checkpoint that is being written in the background.

    Attributes:
        place: folder or URL of the checkpoints.
        attempt: name from `Storage.begin`.
        slot: the copy that it is written from.
        begun: start of the save, seconds since 1970.
        stall: seconds that training waited for it.
        deleted: checkpoints deleted to make room for it.
        answers: the process' replies about it.
        reported: whether its outcome has been reported.
    """

    step: int
    place: Path | str
    attempt: str
    slot: Slot
    begun: float
    stall: float
    deleted: tuple[int, ...]
    answers: list[dict[str, Any]] = field(default_factory=list)
    reported: bool = False


class BackgroundWriter:
    """The process, started on first use, which writes one checkpoint at a time.

    It has its own session, so that signals of a terminal do not reach it.

    Attributes:
        pending: the checkpoint that it was last asked for; None if its outcome is settled.
        removes: a folder in shared memory that the process holds and removes when it ends.
    """

    def __init__(self) -> None:
        self.pending: PendingWrite | None = None
        self.removes: SharedFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""  # the start of a line that the process has not completed

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._running().pid

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            folder = self.removes
            self._rest = b""
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stoker.checkpoint.writer", *([str(folder.path)] if folder else [])],
                pass_fds=[folder.lock] if folder is not None and folder.lock is not None else [],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        return self._process

    def write(self, request: WriteRequest, pending: PendingWrite) -> None:
        """Begins to write a checkpoint."""
        self._send(json.dumps(asdict(request)).encode())
        self.pending = pending

    def _send(self, line: bytes) -> None:
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(line + b"\n")
        except BrokenPipeError:  # `answer` reports its end
            process.wait()

    def answer(self, kind: str, *, timeout: float | None = None) -> dict[str, Any] | None:
        """Returns the process' reply about the pending checkpoint: one of this kind, or an error.

        Args:
            timeout: seconds to wait for it, after which the result is None; by default no limit.
        """
        pending, process = self.pending, self._process
        assert pending is not None and process is not None and process.stdout is not None
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if found := next((answer for answer in pending.answers if kind in answer or "error" in answer), None):
                return found
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not has_input(process.stdout.fileno(), left):
                return None
            if data := os.read(process.stdout.fileno(), 1 << 20):
                *lines, self._rest = (self._rest + data).split(b"\n")
                pending.answers += [answer for line in lines if (answer := json.loads(line))["step"] == pending.step]
            else:
                words = f"the background writer ended with exit code {process.wait()}"
                pending.answers.append({"error": words, "errno": 0, "at": time.time()})

    def outcome(self) -> dict[str, Any]:
        """Returns the outcome of the pending checkpoint once it is committed or has failed. A collective."""
        pending = self.pending
        assert pending is not None
        answers = run_on_all_ranks(lambda: self.answer("written"))
        failed = next((answer for answer in answers if answer is not None and "error" in answer), None)

        def end() -> dict[str, Any]:
            if failed is not None:
                self._send(GIVE_UP)
            answer = self.answer("committed", timeout=VISIBLE)
            if answer is not None:
                self.answer("retained", timeout=DELETES)  # no one else deletes checkpoints meanwhile
                return failed or answer
            process = self._running()
            process.kill()
            process.wait()
            with suppress(OSError):  # the next start cleans up
                storage = storage_of(pending.place)
                if pending.step in storage.steps():  # it was committed meanwhile
                    return {"committed": sum(storage.sizes(pending.step).values()), "at": time.time()}
                storage.give_up(pending.attempt)
            words = (
                f"what another machine has written to {pending.place} cannot be seen on this one: "
                "checkpoint.to must be a folder that all machines share"
            )
            return {"error": words, "errno": 0, "at": time.time()}

        return by_first(end)

    def close(self, *, wait: bool) -> bool:
        """Ends the process after its work is done; returns whether there was one.

        Args:
            wait: whether to wait for its end.
        """
        process, self._process, self.pending = self._process, None, None
        if process is None:
            return False
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        if wait:
            process.wait(ENDS)
        return True
