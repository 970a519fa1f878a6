"""A supervisor's script on a host: it outlives the shell that starts it, leaves its exit code, and ends as a group."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from submitting import submission_in

from stoker.cluster.environment import ENVIRONMENT, environment_text, variables
from stoker.cluster.shell import LocalShell
from stoker.cluster.ssh.start_script import START, launch_line, start_script, state_script, stop_script
from stoker.job.targets.ssh import SshBlock

# In the place of Python: what it was given, and a child that must end with it.
FAKE = """#!/bin/sh
echo "$@" > said
echo "$FLAVOUR $CUDA_VISIBLE_DEVICES" > environment
[ -e quick ] && exit $(cat quick)
sleep 300 &
echo $! > child
trap 'echo saved > saved; [ -e stubborn ] || exit 143' TERM
while :; do sleep 0.05; done
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    python = tmp_path / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    target = {"hosts": ["a"], "python": str(python), "environment": {"FLAVOUR": "it's sweet"}, "code": False}
    submission = submission_in(tmp_path, target={"ssh": target})
    block = SshBlock.model_validate(target)
    (tmp_path / START).write_text(start_script(submission, block, ["10.0.0.1:7", "10.0.0.2:7"]))
    (tmp_path / ENVIRONMENT).write_text(environment_text(variables(block, {})))
    return tmp_path


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def state(home: Path) -> str:
    return LocalShell().run(state_script(str(home), "h1")).decode().strip()


def launch(home: Path, slots: str = "") -> int:
    LocalShell().run(launch_line(str(home), "h1", "10.0.0.1", slots))
    return int((home / "h1.pids").read_text().split()[0])


def test_it_gets_what_the_node_needs_and_leaves_its_exit_code(home: Path) -> None:
    (home / "quick").write_text("7")
    assert state(home) == "gone"
    launch(home, "1,3")
    until(lambda: state(home) == "ended 7")
    assert (home / "environment").read_text() == "it's sweet 1,3\n"
    assert (home / "said").read_text() == (
        "-m stoker node job.yaml --rendezvous 10.0.0.1:7,10.0.0.2:7 --secret secret --nodes 1 --devices 1 "
        "--name h1 --listen 10.0.0.1\n"
    )


def test_stop_lets_it_save_and_leaves_no_process(home: Path) -> None:
    group = launch(home)
    until((home / "child").exists)
    assert state(home) == "running" and os.getpgid(group) == group != os.getpgrp()
    child = int((home / "child").read_text())
    LocalShell().run(stop_script(str(home), "h1", 20))
    assert (home / "saved").exists() and state(home) == "ended 143"
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_what_does_not_end_is_killed_as_a_group(home: Path) -> None:
    (home / "stubborn").touch()
    launch(home)
    until((home / "child").exists)
    child = int((home / "child").read_text())
    LocalShell().run(stop_script(str(home), "h1", 1))
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    assert state(home) == "ended 137"


def test_a_process_number_that_another_has_by_now_is_not_ended(home: Path) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        (home / "h1.pids").write_text(f"{other.pid} {other.pid} 12345\n")
        assert state(home) == "gone"
        LocalShell().run(stop_script(str(home), "h1", 1))
        assert other.poll() is None
        other.kill()


def test_variables_that_are_handed_on() -> None:
    block = SshBlock(hosts=["a"], environment={"NCCL_DEBUG": "WARN"}, forward=["NCCL_*", "HF_TOKEN"])
    given = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "HF_TOKEN": "x y", "HOME": "/root"}
    values = variables(block, given)
    assert values == {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5", "HF_TOKEN": "x y"}
    assert "export HF_TOKEN='x y'\n" in environment_text(values)
    assert "x y" not in environment_text(values, hidden=True)
    assert "hunter2" not in environment_text(
        {"MYSQL_PWD": "hunter2", "REDIS_AUTH": "hunter2", "HOME_PW": "hunter2"}, hidden=True
    )
