"""Logs of several places as one stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cluster import log_files
from stoker.cluster.log_files import LogPlace, rank_label, read_logs, run_logs
from stoker.cluster.shell import Given, LocalShell, ShellFailed


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "POLL", 0.01)


def test_lines_have_their_rank(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("a\nb\n")
    (tmp_path / "rank-10.log").write_text("c\nno end")
    (tmp_path / "rank-1.log").write_text("5%\r10%\r\nd\n")
    place = LogPlace(LocalShell(), f"{tmp_path}/rank-*.log", rank_label)
    both = [place, place]  # two hosts that see one folder
    lines = list(read_logs(both, rank=None, follow=False, ended=lambda: False))
    assert lines == ["rank 0 | a", "rank 0 | b", "rank 1 | 10%", "rank 1 | d", "rank 10 | c", "rank 10 | no end"]
    assert list(read_logs(both, rank=10, follow=False, ended=lambda: False)) == ["c", "no end"]
    assert list(read_logs(both, rank=7, follow=False, ended=lambda: False)) == []


def test_lines_of_stages_have_their_names(tmp_path: Path) -> None:
    for folder in ("logs", "sft/logs", "ppo/logs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sft/logs/rank-0.log").write_text("a\n")
    (tmp_path / "ppo/logs/rank-1.log").write_text("b\n")
    places = run_logs(LocalShell(), str(tmp_path))
    lines = list(read_logs(places, rank=None, follow=False, ended=lambda: True))
    assert sorted(lines) == ["ppo rank 1 | b", "sft rank 0 | a"]
    (tmp_path / "logs/rank-0.log").write_text("of the run\n")
    lines = list(read_logs(places, rank=None, follow=False, ended=lambda: True))
    assert "rank 0 | of the run" in lines and len(lines) == 3


def test_following_sees_what_is_written_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "rank-0.log"
    monkeypatch.setattr(log_files, "MOST", 7)
    looks = 0

    def ended() -> bool:
        nonlocal looks
        looks += 1
        with log.open("a") as file:
            file.write(f"look {looks}\nrest of a long line {looks}\n")
        return looks == 4

    place = LogPlace(LocalShell(), f"{tmp_path}/rank-*.log", rank_label)
    lines = list(read_logs([place], rank=0, follow=True, ended=ended))
    assert lines == [line for n in range(1, looks + 1) for line in (f"look {n}", f"rest of a long line {n}")]


def test_a_log_that_begins_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("a long first line\n")
    texts = iter(["short\n"])

    def ended() -> bool:
        text = next(texts, None)
        if text is not None:
            log.write_text(text)
        return text is None

    place = LogPlace(LocalShell(), f"{tmp_path}/rank-*.log", rank_label)
    stream = read_logs([place], rank=0, follow=True, ended=ended)
    assert list(stream) == ["a long first line", "short"]


class Unreachable(LocalShell):
    """A host that does not answer."""

    name = "h2"

    def run(self, script: str, *, given: Given = b"", timeout: float | None = None) -> bytes:
        raise ShellFailed(self.name, 255, "cannot be reached: no route")


def test_a_host_that_cannot_be_reached_is_named_once_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("a\n")
    places = [LogPlace(shell, f"{tmp_path}/rank-*.log", rank_label) for shell in (Unreachable(), LocalShell())]
    looks = iter([False, False, True])
    lines = list(read_logs(places, rank=None, follow=True, ended=lambda: next(looks)))
    assert lines == ["h2 | cannot be reached: no route", "rank 0 | a"]


class Behind(LocalShell):
    """A host that shares the folder of another, and listed it before that one's log grew."""

    def run(self, script: str, *, given: Given = b"", timeout: float | None = None) -> bytes:
        found = super().run(script, given=given, timeout=timeout)
        if not script.startswith("stat"):
            return found
        index, size, rest = found.split(b" ", 2)
        return b" ".join((index, b"%d" % max(0, int(size) - 2), rest))


def test_hosts_that_share_a_folder_repeat_no_line(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("a\nb\n")
    places = [LogPlace(shell, f"{tmp_path}/rank-*.log", rank_label) for shell in (LocalShell(), Behind())]
    looks = iter([False, False, True])
    assert list(read_logs(places, rank=0, follow=True, ended=lambda: next(looks))) == ["a", "b"]
