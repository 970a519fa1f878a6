"""The folders of runs that `stoker ui` is given."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from stoker.cli.main import main


def test_a_folder_of_runs_in_a_folder_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", "--runs", str(tmp_path / "mispelt" / "runs")]) == 2
    assert f"--runs: there is no folder {tmp_path / 'mispelt'}; is it misspelt?" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("exists", [True, False])
def test_a_new_folder_of_runs_is_reported(exists: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    if exists:
        folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["ui", "--runs", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert (f"note: the folder {folder} is new" in capsys.readouterr().err) is not exists
    assert folder.is_dir()
