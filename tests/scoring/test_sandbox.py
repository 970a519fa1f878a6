"""The sandbox refuses what a program should not do; each refusal against the same program outside."""

from __future__ import annotations

import re
import subprocess
import sys
import time
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


FORGED = {  # code that ends a program with a claim to have passed
    "exit": "os._exit(0)",
    "sys.exit": "sys.exit(0)",
    "SystemExit": "raise SystemExit",
    "output": "print('x passed')\n1/0",
    "a name": "raise type('passed', (Exception,), {})",
    "argv": "for word in sys.orig_argv + open('/proc/self/cmdline').read().split(chr(0)):\n    claim(word)",
    "frames": """
frame = sys._getframe()
while frame := frame.f_back:
    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
        claim(value)
""",
    "collector": """
import gc
frames = [frame for frame in gc.get_objects()] + [sys._getframe(n) for n in range(3)]
for value in frames + gc.get_referents(*frames):
    claim(value)
""",
    "input": "claim(os.read(0, 99)); claim(sys.stdin.buffer.read())",
}
CLAIM = r"""
import os, re, sys
def claim(sign):
    sign = sign.encode() if isinstance(sign, str) else sign
    if isinstance(sign, bytes) and (found := re.search(b"[0-9a-f]{32}", sign)):
        for pipe in range(3, 9):
            try:
                os.write(pipe, b"\n" + found[0] + b" passed")
            except OSError:
                pass
        os._exit(0)
"""


@pytest.mark.parametrize("how", FORGED)
def test_a_program_that_ends_early_has_not_passed(how: str) -> None:
    assert not run_program(f"{CLAIM}\n{FORGED[how]}\nos._exit(0)\n").passed


@pytest.mark.parametrize("name", ["type", "BaseException"])
def test_a_program_that_replaces_builtins_has_not_passed(name: str) -> None:
    program = "import builtins\nclass Said:\n    __name__ = 'passed'\n"
    assert not run_program(f"{program}builtins.{name} = lambda *_: Said()\nassert False").passed


def test_a_program_cannot_fill_the_memory_of_its_reader() -> None:
    began = time.monotonic()
    assert run_program("import os\nwhile True: os.write(3, b'x' * 4096)", seconds=60) == ProgramOutcome(False, "output")
    assert time.monotonic() - began < 30


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
