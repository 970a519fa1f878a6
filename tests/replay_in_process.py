"""The replay of an export in this process instead of a fresh one, whose imports take five seconds of a processor."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import pytest

from stoker.checkpoint.export import replay, score_export
from stoker.train.ranking import replay_export


@contextmanager
def replay_in_process() -> Iterator[None]:
    """Runs the replay's own program here, within the block; other programs start as ever."""
    start = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if "stoker.checkpoint.export.replay" in command:
            program = lambda: replay._main(command[-1:])  # noqa: E731
        elif "stoker.checkpoint.export.score_export" in command:
            program = lambda: score_export._main(command[-1])  # noqa: E731
        elif "stoker.train.ranking.replay_export" in command:
            program = replay_export._main
        else:
            return start(command, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(options["input"]))
            with redirect_stdout(io.StringIO()) as printed:
                program()
        return subprocess.CompletedProcess(command, 0, stdout=printed.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", run)
        yield
