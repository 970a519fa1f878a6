"""Columns of long runs on the disk: the next process of the page finds them, and they never say what is not so."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import make_run

from stoker.page.run_data import metric_columns, metric_index, metric_series
from stoker.page.run_data.metric_columns import MetricColumns
from stoker.page.run_data.metric_series import MetricSeries, SeriesCache
from stoker.page.run_data.run_view import RunViews
from stoker.runs import line_batches
from stoker.runs.run_folder import RunFolder

STEPS = 40


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten lines are a long run, read in small pieces."""
    monkeypatch.setattr(metric_series, "WORTH", 10)
    monkeypatch.setattr(line_batches, "PIECE", 300)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The lines that were read as JSON."""
    found: list[bytes] = []
    read = metric_columns._objects

    def counted(lines: list[bytes]) -> list[dict[str, Any]]:
        found.extend(lines)
        return read(lines)

    monkeypatch.setattr(metric_columns, "_objects", counted)
    yield found


def lines(begin: int, end: int, **more: Any) -> str:
    return "".join(json.dumps({"step": step, "loss": 1 / step, **more}) + "\n" for step in range(begin, end))


def opened(path: Path, kept: Path) -> MetricSeries:
    """The series as another process of the page sees it."""
    found = MetricSeries(path, kept)
    found.refresh()
    return found


def same(one: MetricSeries, other: MetricSeries) -> bool:
    columns = all(np.array_equal(one.column(key), other.column(key), equal_nan=True) for key in other.keys())  # noqa: SIM118
    return columns and (one.keys(), one.offset, one.last()) == (other.keys(), other.offset, other.last())


def test_a_second_process_reads_no_line_again(tmp_path: Path, parsed: list[bytes]) -> None:
    path, kept = tmp_path / "metrics.jsonl", tmp_path / "kept"
    path.write_text(lines(1, STEPS + 1, note="a word"))
    first = opened(path, kept)
    assert len(parsed) == STEPS and [file.stat().st_mode & 0o077 for file in (kept,)] == [0]
    parsed.clear()
    assert same(opened(path, kept), first) and not parsed
    with path.open("a") as file:
        file.write(lines(41, 46, later=7) + '{"step": 46, "lo')
    second = opened(path, kept)
    assert len(parsed) == 5 and second.column("step").tolist() == list(range(1, 46))
    assert np.isnan(second.column("later")[:40]).all() and second.column("later")[40:].tolist() == [7] * 5
    with path.open("a") as file:
        file.write('ss": 0}\n' + lines(47, 57))
    second.refresh()
    parsed.clear()
    third = opened(path, kept)
    assert not parsed and same(third, second) and third.last() == {"step": 56, "loss": 1 / 56}
    assert len(list(kept.iterdir())) == 1


def test_another_file_of_the_same_name_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, kept = tmp_path / "metrics.jsonl", tmp_path / "kept"
    path.write_text(lines(1, 41))
    series = opened(path, kept)
    other = tmp_path / "other"
    other.write_text(lines(1, 21, loss=3))
    other.replace(path)  # as training does that goes back
    series.refresh()
    assert series.column("loss").tolist() == [3] * 20 and same(opened(path, kept), series)
    path.write_text(lines(1, 21, loss=5))  # the same file, as long as before, with other lines
    assert opened(path, kept).column("loss").tolist() == [5] * 20
    path.write_text("")
    assert opened(path, kept).keys() == []


@pytest.mark.parametrize("damage", ["cut", "turned", "more", "twice", "no header", "empty", "link", "gone"])
def test_a_damaged_index_costs_time_alone(tmp_path: Path, damage: str, parsed: list[bytes]) -> None:
    path, kept = tmp_path / "metrics.jsonl", tmp_path / "kept"
    path.write_text(lines(1, 31))
    opened(path, kept)
    with path.open("a") as file:
        file.write(lines(31, 51))
    whole = opened(path, kept)
    (index,) = kept.iterdir()
    content = index.read_bytes()
    if damage == "link":
        index.rename(tmp_path / "aside")
        index.symlink_to(tmp_path / "aside")
    elif damage == "gone":
        index.unlink()
    else:
        spoilt = {
            "cut": content[:-5],
            "more": content + b"{",
            "twice": content * 2,
            "no header": b"x" + content,
            "empty": b"",
        }
        index.write_bytes(spoilt.get(damage, content[:-3] + b"\0\0\0"))
    assert same(opened(path, kept), whole)
    parsed.clear()
    assert same(opened(path, kept), whole)
    assert not parsed, "the index was not mended"


def test_two_processes_at_once_spoil_nothing(tmp_path: Path) -> None:
    path, kept = tmp_path / "metrics.jsonl", tmp_path / "kept"
    path.write_text(lines(1, 21))
    both = [opened(path, kept), opened(path, kept)]
    for begin in (21, 41, 61):
        with path.open("a") as file:
            file.write(lines(begin, begin + 20))
        for series in both:
            series.refresh()
    assert same(both[0], both[1]) and same(opened(path, kept), both[0])


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_index, "MOST_FILES", 3)
    kept = tmp_path / "kept"
    for number in range(5):
        (tmp_path / str(number)).write_text(lines(1, 31))
        opened(tmp_path / str(number), kept)
        os.utime(max(kept.iterdir(), key=lambda path: path.stat().st_mtime_ns), (number, number))
    assert sorted(path.stat().st_mtime for path in kept.iterdir())[0] == 2


def test_what_is_no_number_is_missing(parsed: list[bytes]) -> None:
    columns = MetricColumns()
    columns.add_lines([b'{"a": 1, "b": true, "c": "3"}', b"", b'{"a": null, "d": {"x": 1}, "c": 2}'])
    spoilt = [b"[1]", b"no", b'{"a": 1}, {"a": 2}', b"[" * 5000]
    columns.add_lines([b'{"a": NaN, "b": 2}', *spoilt, b'{"a": 1%b}' % (b"0" * 400)])
    columns.add_lines([b"\xff{}"])
    assert columns.names() == ["a", "c", "b"] and columns.count == 4
    assert [None if math.isnan(value) else value for value in columns.column("a")] == [1, None, None, None]
    assert [None if math.isnan(value) else value for value in columns.column("b", 1)] == [None, 2, None]
    assert [None if math.isnan(value) else value for value in columns.column("c")] == [None, 2, None, None]


def test_a_list_reads_a_run_again_once_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.page.run_data import run_view

    asked: list[Path] = []
    read = run_view.newest_lines
    monkeypatch.setattr(run_view, "newest_lines", lambda path, count: asked.append(path) or read(path, count))
    folders = [RunFolder(make_run(tmp_path / str(number))) for number in range(12)]
    views = RunViews(SeriesCache())
    for _ in range(3):
        assert [views.summary(folder)["step"] for folder in folders] == [5] * 12
    assert len(asked) == 12
    with folders[3].metrics.open("a") as file:
        file.write('{"step": 6, "seconds": 2}\n')
    assert [views.summary(folder)["step"] for folder in folders] == [5, 5, 5, 6, *[5] * 8]
    assert asked[12:] == [folders[3].metrics]
    with folders[3].take():
        folders[3].event("resumed", steps=10)
        found = views.summary(folders[3])
        assert (found["status"], found["seconds_left"]) == ("running", 4.0)
