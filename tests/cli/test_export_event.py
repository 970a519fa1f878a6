"""An export whose run cannot be written: complete, with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli.commands.export import _record
from stoker.runs.run_folder import RunFolder


def test_an_event_that_cannot_be_stored_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _record(RunFolder(tmp_path / "gone"), format="merged")
    assert "WARNING: the run's events do not have this export" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    _record(RunFolder(tmp_path / "run"), format="merged")
    assert RunFolder(tmp_path / "run").read_events()[0]["format"] == "merged"
