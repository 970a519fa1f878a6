"""Which folders a command that fails removes: only a new one in which no training has begun."""

from __future__ import annotations

import signal
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.commands import node
from stoker.cli.commands.train import _print_ending
from stoker.cli.main import main
from stoker.cli.output.run_report import say_ending
from stoker.cli.train import start_run
from stoker.cli.train.start_run import take_folder
from stoker.errors import CannotRun, Interrupted, RunFailed, UserError
from stoker.job import load_job
from stoker.launch import forkserver
from stoker.launch.nodes.folder_hold import SEEN, FolderHold
from stoker.launch.nodes.group import Group, Member, Node
from stoker.launch.run_spec import RunSpec
from stoker.resilience.stop_signals import STOPPED_BEFORE
from stoker.runs.run_folder import RunFolder
from stoker.train.run_result import RunResult

JOB = """
task: module
module: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}
steps: 2
train: {batch: 4}
"""


@pytest.mark.parametrize(
    ("events", "error", "left"),
    [
        ([], CannotRun("no memory"), False),
        (["group", "shrunk"], UserError("wrong"), False),
        (["started"], CannotRun("no memory"), True),
        (["group", "resumed"], UserError("the data have changed"), True),  # from checkpoints at a URL
        ([], RunFailed("a bug"), True),
    ],
)
def test_a_run_that_has_trained_is_never_removed(
    tmp_path: Path, events: list[str], error: UserError, left: bool
) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(type(error)), take_folder(folder):
        for event in events:
            folder.event(event)
        raise error
    assert folder.path.exists() == left


def test_an_earlier_folder_is_never_removed(tmp_path: Path) -> None:
    with pytest.raises(UserError), take_folder(RunFolder(tmp_path)):
        raise UserError("wrong")
    assert tmp_path.exists()


@pytest.mark.parametrize("leads", [True, False])
def test_only_the_leading_node_removes_the_folder(tmp_path: Path, leads: bool) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")
    hold = FolderHold(spec, lambda: take_folder(RunFolder(spec.output)))
    with pytest.raises(UserError, match="refused"), hold:
        assert hold.hold(lately_led=False)
        if not leads:
            hold.let_go()
        raise UserError("refused")
    assert spec.output.exists() != leads
    assert leads or not list(spec.output.glob(".group-*"))


@pytest.mark.parametrize("task", ["module", "grpo"])
def test_nodes_without_a_shared_folder_train_no_policy(tmp_path: Path, task: str) -> None:
    policy = "task: grpo\nmodel: model\ndata: asked.jsonl\ngrpo: {rewards: exact}\nsteps: 2\n"
    (tmp_path / "job.yaml").write_text((JOB if task == "module" else policy) + "checkpoint: {to: 's3://bucket/run'}\n")
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")
    group = Group(1, (Member(Node("first", ("127.0.0.1", 1), (0,)), 0, 1),), mark=".group-0")
    hold = FolderHold(spec, lambda: take_folder(RunFolder(spec.output)))
    if task == "module":
        assert hold.is_seen(group, SEEN, node="second")
        return
    assert not hold.is_seen(group, 0.0, node="second")
    with pytest.raises(UserError, match=r"is not seen on node second.* answers"):
        hold.is_seen(group, SEEN, node="second")


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (3.0, 2.5, "held-out loss 3.0000 -> 2.5000"),
        (None, 2.5, "held-out loss 2.5000"),
        (None, None, "training loss 4.0000 -> 2.0000"),
    ],
)
def test_the_summary_names_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: float | None, after: float | None, line: str
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")
    say_ending(
        spec, RunResult("done", 2, 2, None, 4.0, 2.0, before, after, None, None, False, 0), "stoker train job.yaml"
    )
    assert capsys.readouterr().out.splitlines()[0] == line


@pytest.mark.parametrize(
    ("best", "step", "last", "named"),
    [(2.5, 3, 2.5, False), (2.49999, 3, 2.5, False), (2.4, 3, 2.5, True), (2.4, 3, None, True), (2.4, 9, None, False)],
)
def test_the_summary_names_a_lower_loss_than_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], best: float, step: int, last: float | None, named: bool
) -> None:
    """Without a last loss, as where a finished run is started again, any other step."""
    (tmp_path / "job.yaml").write_text(JOB)
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")
    say_ending(spec, RunResult("done", 9, 9, None, 4.0, 2.0, 3.0, last, best, step, True, 0), "stoker train job.yaml")
    named_so = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lowest")]
    assert named_so == ["lowest held-out loss 2.4000 at step 3: select it with --at best"] * named


def test_the_next_commands_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\nsteps: 9\n")
    run = tmp_path / "my run"
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, run)
    say_ending(spec, RunResult("done", 9, 9, None, 4.0, 2.0, None, None, None, None, True, 0), "stoker train job.yaml")
    assert f"\n  stoker chat '{run}' --compare\n" in capsys.readouterr().out


def test_the_default_job_takes_an_override_longer_than_a_file_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", f"model.stop={'x' * 300}"]) == 2
    assert capsys.readouterr().err.startswith("error: job.yaml: there is no such file")


@pytest.mark.parametrize(
    "words",
    [
        ("--nodes", "2:3", "--devices", "4", "--listen", "10.0.0.1", "--name", "spare", "--spare"),
        ("train.lr=1e-3",),
    ],
)
def test_the_command_that_continues_a_node_has_its_options(words: tuple[str, ...]) -> None:
    command = ["job.yaml", "--rendezvous", "10.0.0.1:29500", "--secret", "run.secret", *words]
    parser = ArgumentParser()
    node.add_arguments(parser)
    given = parser.parse_intermixed_args(command)
    assert parser.parse_intermixed_args(node._command(given)[2:]) == given


@pytest.mark.parametrize(("follow", "end"), [(None, ""), (60.0, " --follow 60"), (1234567.5, " --follow 1234567.5")])
def test_the_command_that_continues_a_run_follows_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], follow: float | None, end: str
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")
    ending = RunResult("stopped", 1, 2, signal.SIGTERM, 4.0, 2.0, None, None, None, None, False, 143)
    given = Namespace(job="job.yaml", overrides=["steps=2"], follow=follow, json=False)
    assert _print_ending(given, spec, ending, first=True) == 143
    assert capsys.readouterr().out.endswith(f"to continue: stoker train job.yaml steps=2{end}\n")


def test_a_run_stopped_before_its_first_step_saved_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")
    say_ending(spec, RunResult("stopped", 0, 2, 15, None, None, None, None, None, None, False, 143), "stoker train")
    assert capsys.readouterr().out == f"{STOPPED_BEFORE}\nto continue: stoker train\n"


@pytest.mark.parametrize(("faults", "code"), [("", 143), ("faults: {requeue: 99}\n", 99)])
def test_a_run_that_a_signal_ends_before_it_has_a_result_gives_the_exit_code_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], faults: str, code: int
) -> None:
    def interrupted(*_: Any) -> None:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start_run, "_train", interrupted)
    monkeypatch.setattr(forkserver, "start_server", lambda **_: None)
    (tmp_path / "job.yaml").write_text(JOB + faults)
    assert main(["train"]) == code and capsys.readouterr() == ("", "")
