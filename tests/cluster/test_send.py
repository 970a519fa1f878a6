"""Files arrive by content; what is there is not sent again."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from stoker.cluster.records_there import write_private
from stoker.cluster.send import STORE, send
from stoker.cluster.sent_files import ARCHIVE, CODE, SentFile, code_archive
from stoker.cluster.shell import LocalShell, ShellFailed, quoted


def files(folder: Path, **contents: str) -> list[SentFile]:
    made = []
    for name, text in contents.items():
        source = folder / name
        source.write_text(text)
        made.append(SentFile(f"data/{name} x.txt", SentFile.made("", text).digest, len(text), source))
    return made


def test_only_new_contents_are_sent(tmp_path: Path) -> None:
    shell, there = LocalShell(), str(tmp_path / "there")
    sent = files(tmp_path, a="first", b="second")
    job = SentFile.made("job.yaml", "task: sft\n")
    assert send(shell, [job, *sent], there, "one") == len("firstsecondtask: sft\n")
    assert send(shell, [job, *sent], there, "two") == 0
    assert send(shell, [job, *files(tmp_path, a="first", b="changed")], there, "two") == len("changed")
    home = tmp_path / "there/two"
    assert (home / "data/a x.txt").read_text() == "first" and (home / "data/b x.txt").read_text() == "changed"
    assert (tmp_path / "there/one/data/b x.txt").read_text() == "second"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert not list((tmp_path / "there" / STORE).glob("in-*"))


def test_the_code_is_whole_and_the_same_for_the_same_code(tmp_path: Path) -> None:
    archive = code_archive()
    assert archive == code_archive() and archive.path == ARCHIVE
    stale = tmp_path / "run" / CODE / "stoker/no_longer.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    send(LocalShell(), [archive], str(tmp_path), "run")
    code = tmp_path / "run" / CODE / "stoker"
    assert (code / "cli/main.py").is_file() and (code / "job/recipes/sft-lora.yaml").is_file() and not stale.exists()


def test_runs_of_the_same_code_share_what_python_compiles(tmp_path: Path) -> None:
    def place(name: str, archive: SentFile) -> Path:
        send(LocalShell(), [archive], str(tmp_path), name)
        return tmp_path / name / CODE / "stoker"

    first = place("one", code_archive())
    words = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(first.parent)!r}); import stoker.errors"]
    subprocess.run(words, check=True)
    compiled = [path.name for path in (place("two", code_archive()) / "__pycache__").iterdir()]
    assert any(name.startswith("errors.") for name in compiled)
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("stoker/__init__.py"))
    other = place("three", SentFile.made(ARCHIVE, buffer.getvalue()))
    assert [path.name for path in other.iterdir()] == ["__init__.py"]
    assert (first / "errors.py").is_file() and not list((tmp_path / STORE).glob("code-*"))


def test_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_private(LocalShell(), quoted(str(path)), b"new")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failing_host_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ShellFailed, match="this machine"):
        send(LocalShell(), [SentFile.made("a", "b")], str(tmp_path / "file"), "run")


@pytest.mark.parametrize(
    ("tar", "told"),
    [
        ('echo "tar: $1: Cannot write: No space left on device" >&2; echo more >&2; exit 2',
         "the files cannot be written: a.jsonl: Cannot write: No space left on device"),
        ('echo "tar: $1: Wrote only 512 of 10240 bytes" >&2; exit 2',
         "the files cannot be written: a.jsonl: the disk or a quota is full"),
        (":", "the files cannot be written: not all files have arrived"),
    ],
)  # fmt: skip
def test_nothing_is_left_of_files_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tar: str, told: str
) -> None:
    file, there = SentFile.made("a.jsonl", "{}"), tmp_path / "there"
    (tmp_path / "tar").write_text(f"#!/bin/sh\nset -- {file.digest}\n{tar}\n")
    (tmp_path / "tar").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ShellFailed) as failed:
        send(LocalShell(), [file], str(there), "run")
    assert str(failed.value) == f"this machine: {told}"
    assert not list((there / STORE).iterdir())


def test_folders_begin_at_home_unless_absolute() -> None:
    assert quoted("/a b") == "'/a b'" and quoted("~/x") == quoted("x") == '"$HOME"/x' and quoted("~") == '"$HOME"'


def test_files_that_are_sent_no_more_are_removed(tmp_path: Path) -> None:
    def sent(*names: str) -> set[str]:
        send(LocalShell(), [SentFile.made(name, name) for name in names], str(tmp_path), "run")
        home = tmp_path / "run"
        return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()} - {".sent"}

    sent("data/a x.jsonl", "data/b $(x) 'y'.jsonl", "-f", "runs")
    (tmp_path / "run/data/own.txt").touch()
    assert sent("data/a x.jsonl", "runs/c") == {"data/a x.jsonl", "runs/c", "data/own.txt"}
    assert (tmp_path / "run/data/a x.jsonl").read_text() == "data/a x.jsonl"
