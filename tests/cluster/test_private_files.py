"""The secret of a job's table servers: sent for its owner only, or refused at its place."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from submitting import submission_in

from stoker.cluster.chosen_target import choose_target
from stoker.cluster.records_there import private_contents, send_private
from stoker.cluster.send import send
from stoker.cluster.shell import LocalShell
from stoker.cluster.submission import Submission
from stoker.cluster.target import open_target
from stoker.errors import UserError
from stoker.job import load_job
from stoker.job.targets.ssh import SshBlock

SECRET = "5f" * 32
SSH = {"ssh": {"hosts": ["a"]}}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for file in (folder / "run.secret", tmp_path / "far.secret"):
        file.write_text(SECRET)
        file.chmod(0o600)
    (folder / "clicks.csv").write_text("clicked,item\n1,7\n")
    return folder


def submitted(target: dict[str, Any], secret: str = "run.secret") -> Submission:
    ranking = {"label": "clicked", "servers": {"addresses": ["10.0.0.7:29500"], "secret": secret}}
    return submission_in(Path.cwd(), task="ranking", model=None, data="clicks.csv", ranking=ranking, target=target)


@pytest.mark.parametrize("secret", ["run.secret", "../far.secret"])
def test_it_arrives_readable_by_its_owner_only_and_in_no_store(tmp_path: Path, secret: str) -> None:
    submission = submitted({"ssh": {"hosts": ["a"], "send": ["run.secret"], "code": False}}, secret)
    (private,) = submission.private
    assert f"secret: {private.path}" in submission.job
    there = tmp_path / "there"
    send(LocalShell(), submission.files, str(there), "tiny")
    send_private(LocalShell(), str(there / "tiny"), private_contents(submission, SshBlock()))
    arrived = there / "tiny" / private.path
    assert arrived.read_text() == SECRET and stat.S_IMODE(arrived.stat().st_mode) == 0o600
    if secret == "run.secret":  # also though `send` names it
        assert [file for file in there.rglob("*") if file.is_file() and SECRET in file.read_text()] == [arrived]


def test_what_would_be_sent_names_it_and_does_not_show_it() -> None:
    for target in (SSH, {"slurm": {"login": "a"}}):
        submission = submitted(target)
        shown = open_target(choose_target(load_job(Path("job.yaml")), None)).preview(submission)
        assert "run.secret" in shown and "mode 600" in shown and SECRET not in shown
    assert not submitted({"slurm": {}}).private  # used where it is


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ({"ray": {}}, "put it on every node with mode 600"),
        ({"kubernetes": {"image": "x"}}, "put it on a volume with mode 600"),
    ],
)
def test_targets_that_others_can_read_refuse_it(tmp_path: Path, target: dict[str, Any], hint: str) -> None:
    with pytest.raises(UserError, match=rf"job.yaml:1:\d+: .*cannot send run.secret.*; {hint}"):
        submitted(target)
    far = str(tmp_path / "far.secret")
    submission = submitted(target, far)  # an absolute path is one on the nodes
    assert f"secret: {far}" in submission.job and not submission.private
    assert not any("far.secret" in file.path for file in submission.files)


def test_a_secret_that_others_can_read_here_is_refused(here: Path) -> None:
    (here / "run.secret").chmod(0o644)
    with pytest.raises(UserError, match=r"job.yaml:1:\d+: .*run.secret can be read by others.*; write `chmod 600"):
        submitted(SSH)
