"""The checks of a node's devices and data, in a fork of the server of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.errors import CannotRun, RunFailed, UserError
from stoker.job import load_job
from stoker.launch.forkserver import start_server
from stoker.launch.run_spec import RunSpec
from stoker.launch.start_checks import check_node
from stoker.node_cache.cache_stats import HERE, CacheStats
from stoker.terminal import Output

JOB = """
task: ranking
data: clicks.csv
steps: 2
ranking: {label: clicked}
"""


@contextmanager
def silent() -> Iterator[None]:
    yield None


@contextmanager
def killed() -> Iterator[None]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield None


@contextmanager
def broken() -> Iterator[None]:
    raise RuntimeError("a bug")
    yield None


@contextmanager
def noting() -> Iterator[None]:
    """Writes which process this is, and whether it holds SIGTERM back and escapes what it says; uses the cache."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    (Path.cwd() / "checked-in").write_text(
        f"{os.getpid()} {signal.SIGTERM in blocked} {isinstance(sys.stderr, Output)}"
    )
    HERE.add(CacheStats(misses=3))
    yield None


@contextmanager
def waiting() -> Iterator[None]:
    try:
        (Path.cwd() / "begun").touch()
        time.sleep(60)
        yield None
    finally:
        (Path.cwd() / "ended").touch()


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clicks.csv").write_text("user,item,clicked\n1,2,1\n2,3,0\n")
    (tmp_path / "job.yaml").write_text(JOB)
    start_server(language=False)
    return RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")


def test_another_process_checks(spec: RunSpec) -> None:
    HERE.add(CacheStats(hits=2))
    here = check_node(spec, 1, silent, here=True)
    there = check_node(spec, 1, noting, here=False)
    assert here.cached.hits >= 2 and there == replace(here, cached=here.cached + CacheStats(misses=3))
    process, holds_back, escapes = (spec.base / "checked-in").read_text().split()
    assert process != str(os.getpid()) and (holds_back, escapes) == ("False", "True")


def test_its_errors_are_those_of_the_check(spec: RunSpec) -> None:
    (spec.base / "clicks.csv").write_text("user,item,seen\n1,2,1\n")
    with pytest.raises(UserError) as here:
        check_node(spec, 1, silent, here=True)
    with pytest.raises(UserError) as there:
        check_node(spec, 1, silent, here=False)
    assert type(there.value) is type(here.value) and there.value.problems == here.value.problems


def test_the_devices_are_those_that_the_job_names(spec: RunSpec) -> None:
    for here in (True, False):
        with pytest.raises(CannotRun, match=r"parallel\.devices: 99 is requested"):
            check_node(spec, 1, silent, devices=[99], here=here)


def test_an_interrupted_check_ends_what_it_has_begun(spec: RunSpec) -> None:
    def interrupt() -> None:
        while not (spec.base / "begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            check_node(spec, 1, waiting, here=False)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (spec.base / "ended").exists()


def test_a_killed_check_and_a_bug_fail_the_node(spec: RunSpec, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailed, match=r"could not be checked: process \d+ was killed by SIGKILL"):
        check_node(spec, 1, killed, here=False)
    with pytest.raises(RunFailed, match="RuntimeError: a bug") as failed:
        check_node(spec, 1, broken, here=False)
    assert not isinstance(failed.value, CannotRun)


def test_a_supervisor_loads_neither_torch_nor_the_libraries_of_language_models() -> None:
    verbs = "stoker.cli.commands.node, stoker.cli.commands.train"
    rooms = f"{verbs}, stoker.launch.supervisor, stoker.launch.start_checks, stoker.launch.processes"
    code = f"import sys, {rooms}; print({{'torch', 'transformers', 'peft'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("set()\n", 0), done.stderr
