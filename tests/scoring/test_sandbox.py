"""The sandbox refuses what a program should not do; each refusal against the same program outside."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.scoring.sandbox import ProgramOutcome, run_program, sandbox_problem
from stoker.scoring.sandbox_child import NAMES, SYSCALLS

pytestmark = pytest.mark.skipif(bool(sandbox_problem()), reason="no sandbox on this system")

HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


def test_a_program_that_is_right_passes_and_a_wrong_one_says_why() -> None:
    assert run_program("assert sum(range(4)) == 6") == ProgramOutcome(True, "passed")
    assert run_program("import math, re, collections, itertools\nassert math.sqrt(4) == 3") == ProgramOutcome(
        False, "AssertionError"
    )
    assert run_program("def f(:") == ProgramOutcome(False, "SyntaxError")


@pytest.mark.parametrize(
    "program", ["import os; os._exit(0)", "import sys; sys.exit(0)", "raise SystemExit", "print('x passed')\n1/0"]
)
def test_a_program_that_ends_early_has_not_passed(program: str) -> None:
    assert not run_program(program).passed


HARMFUL = {
    "network": "import socket\nserver = socket.socket()\nserver.bind(('127.0.0.1', 0))",
    "name look-up": "import socket\nsocket.socketpair()",
    "fork": "import os\nif os.fork() == 0:\n    os._exit(0)",
    "new program": "import subprocess\nsubprocess.run(['true'], check=True)",
    "signal": "import os, signal\nos.kill(os.getpid(), 0)",
    "file": "open('here', 'w').write('x')",
    "folder": "import os\nos.mkdir('here')",
    "rename": "import os, tempfile\nos.rename(PATH, PATH + '2')",
    "remove": "import os\nos.unlink(PATH)",
    "mode": "import os\nos.chmod(PATH, 0o777)",
    "memory file": "import os\nos.memfd_create('x')",
}


@pytest.mark.parametrize("what", HARMFUL)
def test_what_would_work_outside_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("whole")
    program = HARMFUL[what].replace("PATH", repr(str(path)))
    assert run_program(program) == ProgramOutcome(False, "PermissionError")
    assert path.read_text() == "whole" and path.stat().st_mode & 0o777 != 0o777
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=60)


def test_threads_are_no_processes() -> None:
    program = "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()"
    assert run_program(program).passed


@pytest.mark.parametrize(
    "program", ["while True: pass", "import time\ntime.sleep(60)", "import signal\nsignal.pause()"]
)
def test_a_program_that_does_not_end_is_ended(program: str) -> None:
    assert run_program(program, seconds=1) == ProgramOutcome(False, "time")


def test_memory_is_limited() -> None:
    program = "x = bytearray(1 << 28)"
    assert run_program(program).passed
    assert run_program(program, memory=1 << 27) == ProgramOutcome(False, "MemoryError")
    assert not run_program("x = []\nwhile True: x.append(bytearray(1 << 24))").passed


def test_it_sees_an_empty_folder_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    assert run_program("import os\nassert os.listdir() == [] and 'SECRET' not in os.environ").passed
    assert run_program("import sys\nassert not any('site-packages' in p for p in sys.path)").passed


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_system_calls_are_the_headers(machine: str) -> None:
    if not Path(HEADERS[machine]).is_file():
        pytest.skip("the kernel's headers are not installed")
    text = Path(HEADERS[machine]).read_text()
    known = dict(re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", text, re.MULTILINE))
    newer = {"fchmodat2"}  # than some headers
    for name in (*NAMES, "open", "openat", "clone", "clone3"):
        if name not in newer:
            assert SYSCALLS[machine][name] == known.get(name, "-"), name
