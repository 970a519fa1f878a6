"""What may become a run's folder: no other folder is written into, moved or removed, and no link is followed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import Timeout

from stoker.cli.main import main
from stoker.errors import RunFailed, UserError
from stoker.launch.start_checks import CheckedNode
from stoker.node_cache.cache_stats import CacheStats
from stoker.runs import run_folder as folder_module
from stoker.runs.run_folder import RunFolder, put_aside
from stoker.runs.step_metrics import MetricsWriter

JOB = """
task: module
module: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}
steps: 2
train: {batch: 4}
faults: {restarts: 0}
parallel: {data: 2}
output: %s
"""


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's own, with files that are not run's, in which jobs are run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    return tmp_path


@pytest.mark.parametrize("words", [[], ["--fresh"]])
@pytest.mark.parametrize("output", [".", '""', "mine", "mine/thesis.tex", "mine/thesis.tex/run"])
def test_a_folder_that_is_not_a_run_is_left_alone(
    output: str, words: list[str], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text(JOB % output)
    before = contents(base)
    assert main(["train", "job.yaml", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: job.yaml:8:9: output: ") and error.count("\n") == 1
    assert contents(base) == before
    assert main(["check", "job.yaml"]) == 2 and capsys.readouterr().err == error


def test_a_place_where_nothing_can_be_written_is_named(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text(JOB % "mine/run")
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "mine" and allowed(path, mode))
    assert main(["train", "job.yaml"]) == 2
    assert f"cannot be written: no files can be made in {base}/mine" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["aside", "take"])
def test_what_is_not_a_run_is_neither_taken_nor_put_aside(way: str, base: Path) -> None:
    (base / "mine" / "job.yaml").write_text("task: sft\n")
    before = contents(base)
    with pytest.raises(UserError, match=r"output: .*mine is a folder with other files \(\w+\.\w+\), not a run"):
        if way == "aside":
            put_aside(base / "mine")
        else:
            RunFolder(base / "mine").take().__enter__()
    assert contents(base) == before


def test_a_run_that_was_killed_at_any_moment_is_one(base: Path) -> None:
    """Whatever files there are by then; also with notes that the user keeps beside them."""
    run = RunFolder(base / "run")
    steps = (
        (run.path / "logs").mkdir,
        (run.path / ".job.yaml.partial").touch,
        lambda: run.write_job("task: sft\n"),
        lambda: run.write_json(run.environment, {}),
        lambda: run.event("started"),
        (run.path / "notes.txt").touch,
    )
    with run.take() as is_new:
        assert is_new
    for step in steps:
        step()
        with run.take() as is_new:
            assert not is_new


def never(*_: object, **__: object) -> Any:
    raise UserError("no data")


def start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = CheckedNode(nccl=False, cached=CacheStats())
    monkeypatch.setattr("stoker.launch.start_checks.check_node", lambda *_, **__: checked)
    monkeypatch.setattr("stoker.launch.supervisor.train_here", never)


def test_a_job_that_is_refused_leaves_no_folder_behind(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_nothing(monkeypatch)
    Path("job.yaml").write_text(JOB % "run")
    assert main(["train", "job.yaml"]) == 2 and not (base / "run").exists()
    (base / "run").mkdir()
    assert main(["train", "job.yaml"]) == 2 and (base / "run").is_dir()


def test_of_two_trains_the_second_leaves_the_folder_of_the_first(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first takes the folder between the second's look at it and its own taking."""

    class Late(folder_module.FileLock):  # type: ignore[misc,valid-type]
        def acquire(self, *_: Any, **__: Any) -> Any:
            Path(self.lock_file).with_name("events.jsonl").write_text("the first's\n")
            raise Timeout(self.lock_file)

    start_nothing(monkeypatch)
    monkeypatch.setattr(folder_module, "FileLock", Late)
    Path("job.yaml").write_text(JOB % "run")
    assert main(["train", "job.yaml"]) == 2
    assert "another process is training" in capsys.readouterr().err
    assert (base / "run" / "events.jsonl").read_text() == "the first's\n"


LINKED = ["job.partial", ".job.yaml.partial", ".environment.json.partial", "job.yaml"]


@pytest.mark.parametrize("name", LINKED)
def test_no_file_is_written_through_a_link(name: str, base: Path) -> None:
    run = RunFolder(base / "run")
    run.path.mkdir()
    (run.path / name).symlink_to(base / "mine" / "thesis.tex")
    run.write_job("task: sft\n")
    run.write_json(run.environment, {})
    assert (base / "mine" / "thesis.tex").read_text() == "years of work"
    assert run.job.read_text() == "task: sft\n" and not run.job.is_symlink()


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "repeated.jsonl", "logs", "checkpoints", ".lock"])
def test_a_run_with_links_is_refused(name: str, base: Path) -> None:
    run = RunFolder(base / "run")
    run.path.mkdir()
    run.write_job("task: sft\n")
    (base / "mine" / "events.jsonl").write_text('{"event": "started"}\n')
    (run.path / "events.jsonl").write_text('{"event": "started"}\n')
    (run.path / name).unlink(missing_ok=True)
    target = base / "mine" / ("events.jsonl" if name == "events.jsonl" else "thesis.tex")
    (run.path / name).symlink_to(target if name.endswith("l") or name == ".lock" else base / "mine")
    before = contents(base)
    with pytest.raises(UserError, match=f"holds a link, {name}, where a run writes"), run.take():
        pass
    if name == "events.jsonl":
        with pytest.raises(RunFailed):
            run.event("started")
    if name == "metrics.jsonl":
        with pytest.raises(RunFailed):
            MetricsWriter(run)
    assert contents(base) == before


def test_python_files_of_the_current_folder_are_not_imported(base: Path) -> None:
    """By ``python -m stoker``, which Python gives that folder; for what it starts see the tests of launch."""
    for name in ("json", "psutil", "argparse"):
        (base / f"{name}.py").write_text("open('imported', 'a').write(__name__)\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run([sys.executable, "-m", "stoker", "check", "none.yaml"], env=environment, check=False)
    assert done.returncode == 2 and not (base / "imported").exists()
