"""Results that cannot be stored: the figures are printed all the same."""

from __future__ import annotations

import argparse
import errno
import json
import os
from pathlib import Path

import pytest

from stoker.cli.eval.report import check_place, finish
from stoker.errors import DiskFailed, RunFailed, UserError
from stoker.runs import evaluations
from stoker.runs.evaluations import Figure, KeptEvaluation


@pytest.mark.parametrize("as_json", [True, False])
def test_figures_are_printed_before_they_are_found_not_to_be_storable(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evaluations").write_text("a file")
    found = KeptEvaluation("answers", 0.0, "run", 1, {}, {}, (Figure("", "exact", 0.25),))
    with pytest.raises(RunFailed, match="no folder"):
        finish(argparse.Namespace(json=as_json, run="run", to=str(tmp_path)), found, [], ["a note"])
    said = capsys.readouterr().out
    if as_json:
        assert json.loads(said)["figures"][0]["value"] == 0.25 and json.loads(said)["kept"] is None
    else:
        assert "0.2500" in said and "a note" in said and "saved in" not in said


def test_a_folder_that_cannot_be_written_is_refused_before_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = argparse.Namespace(run="run", to=str(tmp_path / "new" / "results"))
    check_place(arguments)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(UserError, match="--to FOLDER"):
        check_place(arguments)


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_results_that_cannot_be_written_whole_leave_nothing(
    failing: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = [], os.fsync

    def fails(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == failing:
            raise error
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    found = KeptEvaluation("answers", 0.0, "run", 1, {}, {}, (Figure("", "exact", 0.25),))
    with pytest.raises(DiskFailed if isinstance(error, OSError) else KeyboardInterrupt):
        evaluations.keep(tmp_path, found, [{"row": 1}])
    assert not list((tmp_path / "evaluations").iterdir())


def test_two_evaluations_that_end_in_the_same_second_are_both_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (KeptEvaluation("answers", 5.0, "run", 1, {}, {}, (Figure("", "exact", v),)) for v in (0.25, 0.75))
    write = evaluations.replace_file

    def interrupted(path: Path, data: str) -> None:
        monkeypatch.setattr(evaluations, "replace_file", write)
        evaluations.keep(tmp_path, other, [{"row": 2}])  # while the first one is being written
        write(path, data)

    monkeypatch.setattr(evaluations, "replace_file", interrupted)
    path = evaluations.keep(tmp_path, one, [{"row": 1}])
    assert json.loads(path.with_suffix(".jsonl").read_text()) == {"row": 1}
    assert {kept.figures[0].value for kept in evaluations.read_evaluations(tmp_path)} == {0.25, 0.75}
