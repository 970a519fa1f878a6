"""The run's folder on several nodes: the leader's node locks it, the others verify that theirs is the same folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self

from filelock import Timeout

from stoker.errors import RunFailed, UserError
from stoker.files import no_link
from stoker.launch.nodes.group import Group
from stoker.launch.nodes.shared_storage import needs_shared_storage, shared_storage_hint
from stoker.launch.run_spec import RunSpec

SEEN = 10.0  # timeout in seconds for another node's file in the run's folder to appear on this node
HELD = 600.0  # timeout in seconds for a lost leader's lock to end: NFSv4 keeps it for 90 s, CephFS for up to 300 s


class FolderHold:
    """Locks the folder of a run, and releases it.

    Args:
        take: locks it; yields whether it is new.
    """

    def __init__(self, spec: RunSpec, take: Callable[[], AbstractContextManager[bool]]) -> None:
        self._spec, self._take = spec, take
        self._stack = ExitStack()
        self._mark = ""
        self._until: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases the folder, if this node holds it; ``take`` gets the error that ends the run."""
        self._remove_mark()
        self._stack.__exit__(kind, error, trace)

    def hold(self, *, lately_led: bool) -> str | None:
        """Locks the folder, and leaves a marker file there for the other nodes.

        Args:
            lately_led: whether another node led the run: it may hold the lock for a moment.

        Returns:
            the file's name; None while another process holds the lock.

        Raises:
            UserError: it cannot be locked, or not be written.
            RunFailed: another node led, and its lock has not ended in time; a scheduler may start the job again.
        """
        if self._mark:
            return self._mark
        try:
            self._stack.enter_context(self._take())
        except UserError as error:
            if not lately_led or not isinstance(error.__cause__, Timeout):
                raise
            now = time.monotonic()
            self._until = self._until or now + HELD
            if now > self._until:
                raise RunFailed(*error.problems) from error
            return None
        self._until = None
        for old in self._spec.output.glob(".group-*"):
            old.unlink(missing_ok=True)
        mark = f".group-{os.urandom(8).hex()}"
        with open(self._spec.output / mark, "xb", opener=no_link):
            pass
        self._mark = mark
        return mark

    def let_go(self) -> None:
        """Releases the folder during the run: another node may lead."""
        self._remove_mark()
        self._stack.close()
        self._until = None

    def is_seen(self, group: Group, waited: float, *, node: str) -> bool:
        """Returns whether the run's folder on this node is that of the group's leader.

        Args:
            waited: seconds since the group was made.

        Raises:
            UserError: it is another folder.
        """
        output, job = self._spec.output, self._spec.loaded.job
        if (output / group.mark).exists():
            return True
        if not needs_shared_storage(job):
            output.mkdir(parents=True, exist_ok=True)
            return True
        if waited < SEEN:
            return False
        words = f"the run's folder {output} of node {group.members[0].node.name} is not seen on node {node}"
        raise UserError(self._spec.loaded.problem("output", words, shared_storage_hint(job)))

    def _remove_mark(self) -> None:
        if self._mark:
            (self._spec.output / self._mark).unlink(missing_ok=True)
            self._mark = ""
