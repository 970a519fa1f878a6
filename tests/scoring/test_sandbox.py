"""The sandbox refuses what a program should not do; each refusal against the same program outside."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.scoring.sandbox import FILE, OWN_EXCEPTION, ProgramOutcome, run_program, sandbox_problem
from stoker.scoring.sandbox_child import CREATE_RULESET, GET_VERSION, NAMES, SYSCALLS, UNKNOWN

pytestmark = pytest.mark.skipif(bool(sandbox_problem()), reason="no sandbox on this system")

GET_LIMIT = {"x86_64": 97, "aarch64": 163}  # number of the system call
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.fixture
def landlock() -> None:
    """Skips a test where the kernel has no Landlock."""
    if ctypes.CDLL(None).syscall(CREATE_RULESET, None, ctypes.c_long(0), GET_VERSION) < 1:
        pytest.skip("this kernel has no Landlock")


def test_a_program_that_is_right_passes_and_a_wrong_one_says_why() -> None:
    assert run_program("assert sum(range(4)) == 6") == ProgramOutcome(True, "passed")
    assert run_program("print('x' * 10_000)").passed
    assert run_program("import math, re, collections, itertools\nassert math.sqrt(4) == 3") == ProgramOutcome(
        False, "AssertionError"
    )
    assert run_program("def f(:") == ProgramOutcome(False, "SyntaxError")


@pytest.mark.parametrize("name", ["secret", "open", "__name__", "ValueError "])
def test_only_names_of_builtin_exceptions_are_passed_on(name: str) -> None:
    assert run_program(f"raise type({name!r}, (ValueError,), {{}})") == ProgramOutcome(False, OWN_EXCEPTION)
    assert run_program(f"import os\nos.write(3, {name.encode()!r})\nraise ValueError").why == OWN_EXCEPTION


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
    "another sign": "claim('0' * 32)",
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


PIPE = "import fcntl, os\nr, w = os.pipe()\n"


def test_a_program_is_run_as_python_runs_a_script() -> None:
    missing = "def f(x: List[int]): return x\nassert f([1])"
    assert run_program(missing) == ProgramOutcome(False, "NameError")
    typed = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar, get_type_hints
import sys
@dataclass
class Point:
    x: int
    seen: ClassVar[list] = []
assert get_type_hints(Point)["x"] is int and sys.modules["__main__"].Point is Point
"""
    assert run_program(typed).passed
    assert run_program(typed.replace("from __future__ import annotations", "")).passed


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
    "signal of a file": f"{PIPE}fcntl.fcntl(r, fcntl.F_SETOWN, os.getpid())",
    "its number": f"{PIPE}fcntl.fcntl(r, fcntl.F_SETSIG, 0)",
    "its owner": f"{PIPE}fcntl.fcntl(r, 15, bytes(4) + os.getpid().to_bytes(4, 'little'))",  # F_SETOWN_EX
    "its start": f"{PIPE}fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)",
    "its start by ioctl": f"{PIPE}fcntl.ioctl(r, 0x5452, bytes(4))",  # FIOASYNC
    "lock": f"{PIPE}fcntl.flock(open(os.__file__), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "record lock": f"{PIPE}fcntl.lockf(open(os.__file__), fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "processors": "import os\nos.sched_setaffinity(os.getppid(), os.sched_getaffinity(os.getppid()))",
    "scheduler": "import os\nos.sched_setscheduler(os.getppid(), os.SCHED_OTHER, os.sched_param(0))",
}


@pytest.mark.parametrize("what", HARMFUL)
def test_what_would_work_outside_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("whole")
    program = HARMFUL[what].replace("PATH", repr(str(path)))
    assert run_program(program) == ProgramOutcome(False, "PermissionError")
    assert path.read_text() == "whole" and path.stat().st_mode & 0o777 != 0o777
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=60)


CALL = """
import ctypes, errno
library = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    return 0 if library.syscall(*map(ctypes.c_long, arguments)) >= 0 else ctypes.get_errno()
"""


def test_every_refused_call_is_refused_by_the_kernel() -> None:
    numbers = SYSCALLS[platform.machine()]
    refused = {name: int(numbers[name]) for name in NAMES if numbers[name] != "-"}
    program = f"""{CALL}
wrong = [name for name, number in {refused}.items() if call(number, *[-1] * 6) != errno.EPERM]
wrong += [number for number in ({UNKNOWN}, 500, 0x40000000 + 39) if call(number, *[-1] * 6) != errno.ENOSYS]
assert not wrong, wrong
"""
    assert run_program(program).passed


def test_shared_memory_of_others_is_out_of_reach() -> None:
    numbers = {name: int(SYSCALLS[platform.machine()][name]) for name in ("shmget", "shmat", "shmctl")}
    library = ctypes.CDLL(None, use_errno=True)
    segment = library.syscall(numbers["shmget"], 0, ctypes.c_long(4096), 0o600)
    if segment < 0:
        pytest.skip("no System V shared memory here")
    remove = f"call({numbers['shmctl']}, {segment}, 0, 0)"
    try:
        program = f"{CALL}\nassert call({numbers['shmat']}, {segment}, 0, 0) == {remove} == errno.EPERM"
        assert run_program(program).passed
    finally:
        subprocess.run([sys.executable, "-c", f"{CALL}\nassert {remove} == 0"], check=True, timeout=60)


def test_each_flag_that_changes_a_file_is_refused_by_the_filter() -> None:
    program = """
import errno, os
for flag in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND):
    try:
        os.open(os.__file__, flag)
    except OSError as error:
        assert error.errno == errno.EPERM, flag  # EACCES is of Landlock, which older kernels do not have
    else:
        raise LookupError(flag)
"""
    assert run_program(program) == ProgramOutcome(True, "passed")


def test_no_command_of_fcntl_leases_a_file() -> None:
    leased = f"{PIPE}fcntl.fcntl(open(os.__file__), fcntl.F_SETLEASE, fcntl.F_RDLCK)"
    assert run_program(leased) == ProgramOutcome(False, "PermissionError")


def test_a_program_has_one_thread_and_no_capabilities() -> None:
    start = "import threading\nthreading.Thread(target=print).start()"
    assert run_program(start) == ProgramOutcome(False, "RuntimeError")
    program = f"""{CALL}
import struct
header, held = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
assert library.capget(header, held) == 0 and held.raw == bytes(24)
"""
    assert run_program(program).passed


def test_a_program_has_its_limits_and_ends_with_its_parent() -> None:
    limits = {resource.RLIMIT_CPU: 6, resource.RLIMIT_FSIZE: FILE, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_CORE: 0}
    program = f"""{CALL}
for limit, value in {limits}.items():
    found = (ctypes.c_ulong * 2)()
    assert library.syscall({GET_LIMIT[platform.machine()]}, limit, found) == 0 and list(found) == [value, value], limit
signal = ctypes.c_int()
assert library.prctl(2, ctypes.byref(signal)) == 0 and signal.value == 9  # PR_GET_PDEATHSIG
"""
    assert run_program(program, seconds=5).passed


@pytest.mark.usefixtures("landlock")
def test_a_program_reads_no_file_but_pythons_and_the_systems_libraries(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("secret")
    os.mkfifo(tmp_path / "pipe")
    for read in (
        f"open({str(tmp_path / 'file')!r})",
        f"os.open({str(tmp_path / 'pipe')!r}, os.O_RDONLY | os.O_NONBLOCK)",
        f"os.listdir({str(tmp_path)!r})",
        "open('/proc/self/environ')",
        "open('/etc/passwd')",
    ):
        assert run_program(f"import os\n{read}") == ProgramOutcome(False, "PermissionError"), read
        subprocess.run([sys.executable, "-c", f"import os\n{read}"], check=True, timeout=60)
    modules = "import asyncio, ctypes, dataclasses, decimal, hashlib, json, random, sqlite3, ssl, unittest, zoneinfo"
    assert run_program(f"{modules}\nopen('/dev/null')\nopen('/dev/urandom')\nimport os\nos.listdir()").passed


CLOSES = "import os, time\nos.closerange(3, 64)\ntime.sleep(60)"  # its outcome cannot come any more


@pytest.mark.parametrize(
    "program", ["while True: pass", "import time\ntime.sleep(60)", "import signal\nsignal.pause()", CLOSES]
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
    for name in (*NAMES, "open", "openat", "fcntl", "ioctl"):
        if name not in newer:
            assert SYSCALLS[machine][name] == known.get(name, "-"), name
