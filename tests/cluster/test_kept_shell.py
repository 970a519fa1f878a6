"""A shell that stays open; a local command takes the place of ssh."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker.cluster.shell import ShellFailed
from stoker.cluster.ssh import kept_shell
from stoker.cluster.ssh.connection import Connection, SshSettings
from stoker.cluster.ssh.kept_shell import LONGEST, KeptShell, NotRunError, takes

HERE = ["sh", "-c"]  # runs the command that follows, as `ssh HOST` does there


def opened(*words: str) -> KeptShell:
    shell = KeptShell.opened(words or HERE, "here")
    assert shell is not None
    return shell


@pytest.fixture
def shell() -> Iterator[KeptShell]:
    shell = opened()
    yield shell
    shell.close()


def after(startup: str) -> KeptShell:
    """A shell whose login runs something first."""
    return opened("sh", "-c", f'{startup}; eval "$1"', "login")


def test_scripts_run_one_after_another_as_each_alone(shell: KeptShell, tmp_path: Path) -> None:
    assert shell.run(f'cd {tmp_path}; name=value; echo "it\'s $name"; exec 5>/dev/null') == b"it's value\n"
    assert shell.run("pwd; echo \"[$name]\"; printf 'without an end'") == f"{Path.cwd()}\n[]\nwithout an end".encode()
    assert shell.run("while read -r a b; do echo $b $a; done", given=b"$HOME `x`\n\xff y\n") == b"`x` $HOME\ny \xff\n"
    assert shell.run("cat") == b""
    assert shell.run("head -c 3000000 /dev/zero; echo; echo said >&2").count(b"\0") == 3_000_000
    assert shell.run("echo \udcff") == b"\xff\n"


def test_threads_wait_for_each_other(shell: KeptShell) -> None:
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda number: shell.run(f"sleep 0.01; echo {number}"), range(40)))
    assert said == [f"{number}\n".encode() for number in range(40)]


def test_a_failed_script_gives_its_code_and_words_and_the_shell_goes_on(shell: KeptShell) -> None:
    for script, code, words in (
        ("echo out; echo why >&2; exit 7", 7, "why"),
        ("if then", 2, "unexpected"),
        ("kill -9 $$", 137, ""),
    ):
        with pytest.raises(ShellFailed) as failed:
            shell.run(script)
        assert failed.value.code == code and words in failed.value.stderr
    assert shell.run("echo on") == b"on\n" and shell.is_open


def test_late_output_of_what_a_script_leaves_behind_is_no_other_scripts(shell: KeptShell, tmp_path: Path) -> None:
    def wait_for(names: Iterable[str]) -> None:
        end = time.monotonic() + 60
        while not all((tmp_path / name).exists() for name in names):
            assert time.monotonic() < end
            time.sleep(0.01)

    late = "echo late; echo late >&2; touch {}"
    for number in range(30):
        script = f"cd {tmp_path}; ({late.format(number)}) & echo {number}"
        assert shell.run(script).replace(b"late\n", b"") == b"%d\n" % number
    wait_for(str(number) for number in range(30))
    script = f"cd {tmp_path}; (while [ ! -e go ]; do sleep 0.01; done; {late.format('said')}) & echo now"
    assert shell.run(script) == b"now\n"
    (tmp_path / "go").touch()
    wait_for(["said"])
    assert shell.run("echo next") == b"next\n"


def test_what_a_login_prints_and_reads_changes_nothing() -> None:
    shell = after("echo welcome; echo news >&2; read -r -t 0.3 answer || :")
    assert shell.run("echo 1") == b"1\n"
    with pytest.raises(ShellFailed) as failed:
        shell.run("echo why >&2; exit 3")
    assert failed.value.stderr == "why"
    shell.close()


def test_a_script_without_answer_ends_the_shell(shell: KeptShell) -> None:
    began = time.monotonic()
    with pytest.raises(ShellFailed, match="here: no answer") as failed:
        shell.run("sleep 30", timeout=0.2)
    assert failed.value.code == 124 and time.monotonic() - began < 20 and not shell.is_open


def test_the_end_of_a_shell_is_that_of_its_command(shell: KeptShell) -> None:
    far = after("echo 'no route' >&2; exit 255")
    with pytest.raises(NotRunError, match="here: no route") as failed:
        far.run("echo 1")
    assert failed.value.code == 255 and not far.is_open and not far.is_ready
    assert shell.run("echo 1") == b"1\n"
    with pytest.raises(ShellFailed) as failed:
        shell.run("echo last words >&2; kill -9 $PPID; sleep 1")
    assert not isinstance(failed.value, NotRunError) and failed.value.stderr.startswith("last words")
    assert not shell.is_open


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_shell, "MOST", len(kept_shell._kept) + 2)
    assert KeptShell.opened(["no-such-command"], "here") is None
    first, second = opened(), opened()
    assert KeptShell.opened(HERE, "here") is None
    first.close()
    first.close()
    third = opened()
    assert third.run("echo 3") == b"3\n"
    del second
    opened().close()
    third.close()
    monkeypatch.setattr(kept_shell, "FILES", 2**40)
    assert KeptShell.opened(HERE, "here") is None


def test_what_is_no_text_of_lines_is_not_taken() -> None:
    assert takes("cat", b"") and takes("cat", b"lines\n")
    assert not takes("cat", b"no end") and not takes("cat", b"\0\n") and not takes("cat", lambda stdin: None)
    assert not takes("cat", b"x" * LONGEST + b"\n")


@pytest.fixture
def logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command `ssh` that runs the last of its words here, and writes its process id for each login."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(
        f'#!/bin/sh\n[ ! -e {tmp_path}/down ] || {{ echo "no route." >&2; exit 255; }}\n'
        f'echo $$ >> {tmp_path}/logins\nfor last; do :; done\nexec sh -c "$last"\n'
    )
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "logins"


def test_a_connection_logs_in_once_and_again_after_its_end(logins: Path) -> None:
    connection = Connection("far", SshSettings())
    assert [connection.run(f"echo {number}") for number in range(3)] == [b"0\n", b"1\n", b"2\n"]
    assert connection.run("cat", given=b"no end") == b"no end"
    first, second = map(int, logins.read_text().split())
    os.kill(first, signal.SIGKILL)
    assert connection.run("echo 3") == b"3\n"  # where its end was not seen yet, by a login of its own
    assert connection.run("echo 4") == b"4\n"
    assert second not in (first, os.getpid()) and 3 <= len(logins.read_text().split()) <= 4
    (logins.parent / "down").touch()
    connection.close()
    with pytest.raises(ShellFailed, match=r"far: cannot be reached: no route$") as failed:
        connection.run("echo 5")
    assert failed.value.code == 255
    (logins.parent / "down").unlink()
    assert connection.run("echo 6") == b"6\n"
    connection.close()
