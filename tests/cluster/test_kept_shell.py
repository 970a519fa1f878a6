"""A shell that stays open, here without ssh."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.cluster.shell import ShellFailed
from stoker.cluster.ssh import kept_shell
from stoker.cluster.ssh.kept_shell import LONGEST, KeptShell, takes


@pytest.fixture
def shell() -> Iterator[KeptShell]:
    shell = KeptShell.opened(["sh"], "here")
    assert shell is not None
    yield shell
    shell.close()


def test_scripts_run_one_after_another_as_each_alone(shell: KeptShell, tmp_path: Path) -> None:
    assert shell.run(f'cd {tmp_path}; name=value; echo "it\'s $name"; exec 5>/dev/null') == b"it's value\n"
    assert shell.run("pwd; echo \"[$name]\"; printf 'without an end'") == f"{Path.cwd()}\n[]\nwithout an end".encode()
    assert shell.run("while read -r a b; do echo $b $a; done", given=b"$HOME `x`\n\xff y\n") == b"`x` $HOME\ny \xff\n"
    assert shell.run("cat") == b""
    assert shell.run("head -c 3000000 /dev/zero; echo; echo said >&2").count(b"\0") == 3_000_000


def test_a_failed_script_gives_its_code_and_words_and_the_shell_goes_on(shell: KeptShell) -> None:
    for script, code, words in (
        ("echo out; echo why >&2; exit 7", 7, "why"),
        ("if then", 2, "unexpected"),
        ("kill -9 $$", 137, ""),
    ):
        with pytest.raises(ShellFailed) as failed:
            shell.run(script)
        assert failed.value.code == code and words in failed.value.said
    assert shell.run("echo on") == b"on\n" and shell.is_open


def test_a_script_without_answer_ends_the_shell(shell: KeptShell) -> None:
    began = time.monotonic()
    with pytest.raises(ShellFailed, match="here: no answer") as failed:
        shell.run("sleep 30", timeout=0.2)
    assert failed.value.code == 124 and time.monotonic() - began < 20 and not shell.is_open


def test_the_end_of_a_shell_is_that_of_its_command() -> None:
    shell = KeptShell.opened(["sh", "-c", "echo 'no route' >&2; exit 255"], "far")
    assert shell is not None
    with pytest.raises(ShellFailed, match="far: no route") as failed:
        shell.run("echo 1")
    assert failed.value.code == 255 and not shell.is_open
    shell.close()


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # those of other tests
    monkeypatch.setattr(kept_shell, "_free", kept_shell.threading.BoundedSemaphore(2))
    first, second = (KeptShell.opened(["sh"], "here") for _ in range(2))
    assert first is not None and second is not None
    assert KeptShell.opened(["sh"], "here") is None
    first.close()
    first.close()
    third = KeptShell.opened(["sh"], "here")
    assert third is not None and third.run("echo 3") == b"3\n"
    assert KeptShell.opened(["no-such-command"], "here") is None
    second.close(), third.close()


def test_what_is_no_text_of_lines_is_not_taken() -> None:
    assert takes("cat", b"") and takes("cat", b"lines\n")
    assert not takes("cat", b"no end") and not takes("cat", b"\0\n") and not takes("cat", lambda stdin: None)
    assert not takes("cat", b"x" * LONGEST + b"\n")
