"""A run's folder: written a whole line at a time, read after any end, taken by one process."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import RunFailed, UserError
from stoker.job.run_records import LOCK
from stoker.runs.json_lines import read_lines
from stoker.runs.line_batches import LONGEST, line_batches
from stoker.runs.listing import summarise
from stoker.runs.run_folder import RunFolder, put_aside
from stoker.runs.step_metrics import MetricsWriter, StepMetrics


def metrics(step: int, norm: float = 1.0) -> StepMetrics:
    return StepMetrics(step, 0.1 * step, norm, 1e-3, 64, 32, 100.0, 0.5, 0.64)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def write(folder: RunFolder, steps: range) -> None:
    writer = MetricsWriter(folder)
    for step in steps:
        writer.write(metrics(step))
    writer.close()


def test_metrics_are_one_object_a_step(folder: RunFolder) -> None:
    write(folder, range(1, 4))
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert set(lines[0]) == {
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "trained_tokens",
        "tokens_per_s",
        "memory_gib",
        "seconds",
        "time",
        "samples",
        "first_sample",
        "data_seconds",
        "stall",
        "effective",
    }


def test_what_is_not_finite_is_null(folder: RunFolder) -> None:
    writer = MetricsWriter(folder)
    writer.write(metrics(1, math.inf))
    folder.event("evaluated", loss=math.nan)
    assert folder.read_metrics()[0]["grad_norm"] is None and folder.read_events()[0]["loss"] is None
    assert "Infinity" not in folder.metrics.read_text() and "NaN" not in folder.events.read_text()


def test_half_a_line_is_passed_over_and_the_next_one_is_whole(folder: RunFolder) -> None:
    write(folder, range(1, 4))
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 4, "lo\xc3')  # killed within a character
    assert [m["step"] for m in folder.read_metrics()] == [1, 2, 3]
    assert folder.forget_after(3) == 0
    write(folder, range(4, 6))
    assert [m["step"] for m in folder.read_metrics()] == [1, 2, 3, 4, 5]

    folder.event("started")
    with folder.events.open("ab") as file:
        file.write(b'{"time": 1, "ev')
    folder.event("resumed", row="caf\u00e9\u2028x")  # a line separator within a text
    assert [e["event"] for e in folder.read_events()] == ["started", "resumed"]
    assert folder.read_events()[1]["row"] == "caf\u00e9\u2028x"


def test_forgetting_keeps_the_steps_before(folder: RunFolder) -> None:
    write(folder, range(1, 8))
    before = folder.metrics.read_text().splitlines()
    assert folder.forget_after(4) == 3
    assert folder.metrics.read_text().splitlines() == before[:4]
    assert folder.forget_after(4) == 0
    assert folder.forget_after(0) == 4 and folder.read_metrics() == []
    assert RunFolder(folder.path / "none").forget_after(0) == 0


def test_lines_that_are_no_objects_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n3\n[2]\n{"b": 2}\n')
    assert list(read_lines(tmp_path / "x.jsonl")) == [{"a": 1}, {"b": 2}]


def test_a_line_that_is_too_long_is_skipped_and_its_file_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"b": "' + "x" * LONGEST + '"}\n{"c": 3}\n{"d": "' + "x" * LONGEST)
    for _ in range(2):
        assert list(read_lines(path)) == [{"a": 1}, {"c": 3}]
    assert capsys.readouterr().err == f"{path}: lines longer than 4 MiB are skipped\n"


@pytest.mark.parametrize("what", ["metrics", "events"])
def test_a_full_disk_is_said_in_words(what: str, folder: RunFolder) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        with pytest.raises(RunFailed, match=rf"{what}\.jsonl cannot be written \(File too large\)"):
            if what == "metrics":
                MetricsWriter(folder).write(metrics(1))
            else:
                folder.event("started")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def test_files_are_replaced_whole(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_job("task: sft\n")
    folder.write_json(folder.environment, {"data": {"a": "b"}})

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunFailed, match="No space left"):
        folder.write_job("task: pretrain\n")
    assert folder.job.read_text() == "task: sft\n"
    assert sorted(p.name for p in folder.path.iterdir()) == ["environment.json", "job.yaml"]


def test_one_process_at_a_time(folder: RunFolder) -> None:
    again = (
        "import sys; from pathlib import Path; from stoker.errors import UserError; "
        "from stoker.runs.run_folder import RunFolder\n"
        "try:\n    with RunFolder(Path(sys.argv[1])).take(): print('taken')\n"
        "except UserError as error: print(error)"
    )

    def other() -> str:
        command = [sys.executable, "-c", again, str(folder.path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert not folder.is_taken()
    with folder.take():
        assert folder.is_taken() and RunFolder(folder.path).is_taken()
        assert "another process is training" in other()
        with pytest.raises(UserError, match="another process"), RunFolder(folder.path).take():
            pass
        with pytest.raises(UserError, match="another process"):
            put_aside(folder.path)
    assert not folder.is_taken() and other() == "taken"


def test_a_run_of_another_user_is_seen_to_train(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = os.open

    def only_read(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith(LOCK) and flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opens(path, flags, *rest, **named)

    with folder.take():
        monkeypatch.setattr(os, "open", only_read)
        assert folder.is_taken() and summarise(folder).state == "running"
        monkeypatch.undo()
    monkeypatch.setattr(os, "open", only_read)
    assert not folder.is_taken()


def test_an_error_within_gives_the_folder_back(folder: RunFolder) -> None:
    with pytest.raises(RuntimeError), folder.take():
        raise RuntimeError
    assert not folder.is_taken()


def test_a_folder_that_cannot_be_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="which is no folder"), RunFolder(tmp_path / "file" / "run").take():
        pass


def test_the_steps_on_disk_are_those_that_the_run_did_not_go_back_behind(folder: RunFolder) -> None:
    assert folder.saved_steps() == set() and folder.updated() is None
    folder.event("started")
    for step, where in ((2, "disk"), (4, "disk"), (5, "memory"), (6, "disk")):
        folder.event("saved", step=step, where=where)
    with folder.events.open("a") as file:
        file.write('{"step": 8}\n{"event": "saved", "where": "disk", "step": null}\n')  # edited by hand
    assert folder.saved_steps() - {0} == {2, 4, 6}
    folder.event("rolled_back", step=7, to=4)
    assert folder.saved_steps() - {0} == {2, 4}
    folder.event("resumed", step=2)
    assert folder.saved_steps() - {0} == {2}
    assert folder.updated() == folder.events.stat().st_mtime


def test_an_old_run_is_put_aside_under_the_first_free_name(tmp_path: Path) -> None:
    for expected in ("run.1", "run.2"):
        (tmp_path / "run").mkdir()
        assert put_aside(tmp_path / "run") == tmp_path / expected
    assert not (tmp_path / "run").exists()


def test_a_line_without_an_end_takes_no_more_memory_than_the_longest_that_is_read(tmp_path: Path) -> None:
    with (tmp_path / "long").open("w+b") as file:
        file.truncate(16 * LONGEST)
        tracemalloc.start()
        try:
            assert not any(lines for lines, _ in line_batches(file))
            assert tracemalloc.get_traced_memory()[1] < 4 * LONGEST
        finally:
            tracemalloc.stop()


def test_lines_of_metrics_without_a_step_are_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"loss": 1.0}\n{"step": 1, "loss": 2.0}\n{"step": "x"}\n{"step": 2, "loss": 1.5}\n')
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]
    assert folder.forget_after(1) == 1 and [line["step"] for line in folder.read_metrics()] == [1]
