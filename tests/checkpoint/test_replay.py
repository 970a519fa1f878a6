"""The fresh process that answers with an export has a limited time, which grows with the weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stoker.checkpoint.export import replay
from stoker.checkpoint.export.replay import ReplayRequest, answer_afresh, time_limit
from stoker.checkpoint.export.score_export import ScoreRequest, replay_scores
from stoker.errors import RunFailed


def test_a_replay_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "STARTING", 0.0)  # sooner than a process can start
    with pytest.raises(RunFailed, match=r"gave no answer within 0 s in a fresh process, so it is not checked"):
        answer_afresh(tmp_path, ReplayRequest((), (), ()))


@pytest.mark.parametrize(
    ("code", "said", "why"),
    [
        (-9, "a warning\n", "the process that loads it was killed by SIGKILL"),
        (3, "", "the process that loads it ended with exit code 3"),
        (1, "Traceback\nOSError: no weights\n", "OSError: no weights"),
    ],
)
def test_how_a_replay_ended_is_told(
    code: int, said: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '{said}' >&2\n" + (f"kill {code} $$" if code < 0 else f"exit {code}"))
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    for asked in (
        lambda: answer_afresh(tmp_path, ReplayRequest((), (), ())),
        lambda: replay_scores(tmp_path, ScoreRequest(())),
    ):
        with pytest.raises(RunFailed) as caught:
            asked()
        assert str(caught.value) == f"the export cannot be loaded: {why}"


def test_larger_weights_have_more_time(tmp_path: Path) -> None:
    for name, size in (("small", 4_000_000), ("large", 400_000_000)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    assert time_limit(tmp_path / "small", None) == 901.0
    assert time_limit(tmp_path / "small", str(tmp_path / "large")) == 1001.0  # an adapter and its base
    assert time_limit(tmp_path, None) == 1001.0  # the files of a folder
