"""The lock of the run's folder, where a node that led before may still hold it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.errors import RunFailed, UserError
from stoker.job import load_job
from stoker.launch.nodes import folder_hold
from stoker.launch.nodes.folder_hold import SEEN, FolderHold
from stoker.launch.nodes.group import Group, Node, assign_ranks
from stoker.launch.run_spec import RunSpec
from stoker.runs import run_folder
from stoker.runs.run_folder import RunFolder

JOB = """
task: module
module: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}
steps: 2
train: {batch: 4}
"""


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    (tmp_path / "job.yaml").write_text(JOB)
    return RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")


def test_a_lost_leaders_lock_is_waited_for_as_long_as_file_systems_keep_it(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(folder_hold, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(run_folder, "PATIENCE", 0)
    with FolderHold(spec, RunFolder(spec.output).take) as hold:
        with RunFolder(spec.output).take():
            with pytest.raises(UserError, match="another process is training") as refused:
                hold.hold(lately_led=False)
            assert refused.value.exit_code == 2
            assert hold.hold(lately_led=True) is None
            now += 400  # CephFS evicts a lost client after 300 s
            assert hold.hold(lately_led=True) is None
            now += 300
            with pytest.raises(RunFailed, match="another process is training"):  # exit code 1: it may be started again
                hold.hold(lately_led=True)
        assert hold.hold(lately_led=True) is not None


def test_an_earlier_wait_does_not_count_for_a_later_one(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(folder_hold, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(run_folder, "PATIENCE", 0)
    with FolderHold(spec, RunFolder(spec.output).take) as hold, RunFolder(spec.output).take():
        assert hold.hold(lately_led=True) is None
        hold.let_go()  # another node leads
        now += 3600
        assert hold.hold(lately_led=True) is None


def test_a_folder_that_cannot_be_written_is_not_waited_for(spec: RunSpec) -> None:
    spec.output.write_text("a file")
    with (
        FolderHold(spec, RunFolder(spec.output).take) as hold,
        pytest.raises(UserError) as refused,
    ):
        hold.hold(lately_led=True)
    assert refused.value.exit_code == 2


def test_a_node_that_sees_another_folder_is_refused_after_a_while(spec: RunSpec, tmp_path: Path) -> None:
    members = assign_ranks([Node("a", ("10.0.0.1", 1), (0,)), Node("b", ("10.0.0.2", 1), (0,))], 2)
    group = Group(1, members, mark=".group-x")
    hold = FolderHold(spec, RunFolder(spec.output).take)
    assert not hold.is_seen(group, SEEN - 0.1, node="b") and not spec.output.exists()
    with pytest.raises(UserError, match=r"/run of node a is not seen on node b; give an `output` on storage that all"):
        hold.is_seen(group, SEEN, node="b")
    spec.output.mkdir()
    (spec.output / ".group-y").touch()  # of another group
    assert not hold.is_seen(group, 0.0, node="b")
    (spec.output / ".group-x").touch()
    assert hold.is_seen(group, 0.0, node="b")


def test_where_checkpoints_are_at_a_url_each_node_has_a_folder_of_its_own(spec: RunSpec, tmp_path: Path) -> None:
    loaded = load_job(tmp_path / "job.yaml", ["checkpoint.to=file:///there"])
    hold = FolderHold(replace(spec, loaded=loaded), RunFolder(spec.output).take)
    assert hold.is_seen(Group(1, (), mark=".group-x"), 0.0, node="b") and spec.output.is_dir()


def test_no_marker_is_left(spec: RunSpec) -> None:
    with FolderHold(spec, RunFolder(spec.output).take) as hold:
        mark = hold.hold(lately_led=False)
        assert mark is not None and (spec.output / mark).exists() and hold.hold(lately_led=False) == mark
        hold.let_go()
        assert not (spec.output / mark).exists()
        with RunFolder(spec.output).take():  # another node leads
            pass
        again = hold.hold(lately_led=False)
        assert again not in (None, mark)
    assert not list(spec.output.glob(".group-*"))
