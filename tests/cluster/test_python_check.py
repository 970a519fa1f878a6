"""The check of a host's Python: its version, the packages that the job needs, and the command that installs them."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from submitting import submission_in

from stoker.cluster.python_check import HINT, PythonProblem, python_problem, requirements_of
from stoker.cluster.shell import LocalShell
from stoker.job.targets.ssh import SshBlock

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def plain(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement)[0]


@pytest.mark.parametrize(
    ("python", "setup", "why"),
    [
        ("/nowhere/python", [], "there is no /nowhere/python"),
        ("{old}", [], "{old} is older than 3.11"),
        (sys.executable, ["false || exit 9"], "the setup commands fail"),
        (sys.executable, ["echo lacks: torch"], ""),
    ],
)
def test_a_host_without_a_fitting_python(tmp_path: Path, python: str, setup: list[str], why: str) -> None:
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 3\n")
    old.chmod(0o755)
    block = SshBlock(hosts=["a"], python=python.format(old=old), setup=setup)
    found = python_problem(LocalShell(), block, ["torch>=2", "ruamel.yaml"], 10)
    absent = why.startswith("there is no")
    assert found == (PythonProblem(why.format(old=old), HINT, is_absent=absent) if why else None)


def test_packages_that_are_missing_are_named_with_their_command(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").touch()
    block = SshBlock(hosts=["a"], python=sys.executable, environment={"PYTHONPATH": str(tmp_path)})
    needed = ["torch>=2", "no-such-package>=1,<2", "no.such.part", "only-here"]
    found = python_problem(LocalShell(), block, needed, 10)
    assert found is not None and found.message == f"{sys.executable} has no no-such-package, no.such.part"
    assert found.hint == f"run there: {sys.executable} -m pip install 'no-such-package>=1,<2' no.such.part"


def test_what_a_job_needs(tmp_path: Path) -> None:
    core = {plain(requirement) for requirement in PROJECT["dependencies"]}
    submission = submission_in(tmp_path, target={"ssh": {"hosts": ["a"]}})
    assert {plain(requirement) for requirement in requirements_of(submission)} == core >= {"torch", "pydantic"}
    remote = submission_in(tmp_path, target={"ssh": {"hosts": ["a"], "code": False}}, checkpoint={"to": "s3://runs/a"})
    assert {plain(requirement) for requirement in requirements_of(remote)} == core | {"s3fs", "stoker"}
