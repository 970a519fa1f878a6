"""The replay of an export in this process instead of a fresh one, whose imports take five seconds of a processor."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stoker.checkpoint import replay


@contextmanager
def replay_in_process() -> Iterator[None]:
    """Runs the replay's own program here, within the block; other programs start as ever."""
    start = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if "stoker.checkpoint.replay" not in command:
            return start(command, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(options["input"]))
            replay._main(command[-1:])
        return subprocess.CompletedProcess(command, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", run)
        yield
