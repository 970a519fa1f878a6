"""Columns of a log that grows: only new files are read, what was there stays, and killed processes leave no trace."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stoker.data.files.rows import Raw, Rejected
from stoker.data.ranking import column_files, column_store
from stoker.data.ranking.click_log import ClickLog, open_log
from stoker.data.ranking.column_store import ColumnStore
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.hardware.cache_folder import cache_folder
from stoker.job.blocks.source_block import SourceBlock
from stoker.node_cache.remote_file import DataFile


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read to be encoded."""
    names: list[str] = []
    whole = column_store.file_rows

    def counted(path: DataFile, form: str) -> Iterator[Raw | Rejected]:
        names.append(path.name)
        return whole(path, form)

    monkeypatch.setattr(column_store, "file_rows", counted)
    return names


def write_day(folder: Path, day: int, *, rows: int = 30, salt: int = 0) -> None:
    (folder / "log").mkdir(exist_ok=True)
    with (folder / "log" / f"day_{day}.jsonl").open("w") as file:
        for n in range(rows):
            row = {"label": (n + salt) % 2, "user_id": n % 5, "city": f"c{day % 4}", "tags": [n, f"t{day}"]}
            file.write(json.dumps({**row, "price": n / 4, "ts": 1000 * day + n}) + "\n")
        file.write('{"label": 7}\nnothing\n')


def opened(folder: Path, path: str = "log/*.jsonl") -> ClickLog:
    return open_log(
        [SourceBlock(path=path)], RankingBlock(slices=["user_id", "city"]), folder, held_out=[], fraction=0.0
    )


def arrays(store: ColumnStore) -> dict[str, np.ndarray]:
    names = ["labels", "time", "group", "grouped", "place", "slice0", "slice1"]
    names += [f"column{n}" for n in range(len(store.features.columns))]
    names += [f"lengths{n}" for n, column in enumerate(store.features.columns) if column.has_ids]
    return {name: np.array(store.array(name)) for name in names}


def assert_same(found: ColumnStore, expected: ColumnStore) -> None:
    for name, array in arrays(expected).items():
        assert np.array_equal(arrays(found)[name], array, equal_nan=array.dtype.kind == "f"), name
    assert found.summary == expected.summary


def afresh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ColumnStore:
    """The same log, all of which is read."""
    with monkeypatch.context() as patched:
        patched.setenv("STOKER_CACHE", str(folder / "another"))
        return opened(folder).training.store


def test_only_new_files_are_read(tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_day(tmp_path, 1)
    write_day(tmp_path, 2)
    first = opened(tmp_path).training.store
    before = arrays(first)
    assert read == ["day_1.jsonl", "day_2.jsonl"]
    write_day(tmp_path, 10, rows=5)
    read.clear()
    grown = opened(tmp_path).training.store
    assert read == ["day_10.jsonl"] and len(grown) == 65
    write_day(tmp_path, 11)
    read.clear()
    again = opened(tmp_path).training.store
    assert read == ["day_11.jsonl"]
    assert again.summary.reasons == {"unknown label": 4, "invalid JSON": 4} or sum(again.summary.reasons.values()) == 8
    assert_same(again, afresh(tmp_path, monkeypatch))
    assert len(first) == 60  # who has the columns open sees what was there
    for name, array in arrays(first).items():
        assert np.array_equal(array, before[name]), name
    assert len({path.parent for path in (cache_folder() / "ranking").glob("*/labels.bin")}) == 1
    read.clear()
    opened(tmp_path)
    assert read == []


@pytest.mark.parametrize("change", ["an earlier file", "another name", "a file in between"])
def test_a_log_that_changed_otherwise_is_read_whole(
    change: str, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_day(tmp_path, 2)
    write_day(tmp_path, 4)
    opened(tmp_path)
    if change == "an earlier file":
        write_day(tmp_path, 2, salt=1)
    elif change == "another name":
        (tmp_path / "log" / "day_2.jsonl").rename(tmp_path / "log" / "day_1.jsonl")
    else:
        write_day(tmp_path, 3)
    write_day(tmp_path, 5)
    read.clear()
    found = opened(tmp_path).training.store
    assert len(read) == (4 if change == "a file in between" else 3)
    assert_same(found, afresh(tmp_path, monkeypatch))


def test_two_logs_that_begin_alike_do_not_disturb_each_other(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_day(tmp_path, 1)
    opened(tmp_path)
    write_day(tmp_path, 2)
    one = opened(tmp_path).training.store
    before = arrays(one)
    write_day(tmp_path, 2, salt=1, rows=12)
    read.clear()
    other = opened(tmp_path).training.store
    assert read == ["day_1.jsonl", "day_2.jsonl"]  # the columns of the first one go on already
    assert_same(other, afresh(tmp_path, monkeypatch))
    write_day(tmp_path, 3)
    read.clear()
    assert_same(opened(tmp_path).training.store, afresh(tmp_path, monkeypatch))
    assert read[0] == "day_3.jsonl"
    assert all(np.array_equal(array, before[name]) for name, array in arrays(one).items())


class Killer:
    """Kills this process before the n-th write, or in the middle of it."""

    def __init__(self, at: int) -> None:
        self.left = at

    def write(self, path: Path, data: bytes) -> None:
        self.left -= 1
        if self.left < 0:
            with path.open("ab") as file:
                file.write(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("at", [0, 1, 3, 7, 11, 12, 13])
@pytest.mark.parametrize("first", [True, False], ids=["the first files", "a new file"])
def test_a_killed_process_leaves_no_trace(
    at: int, first: bool, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_day(tmp_path, 1)
    if not first:
        opened(tmp_path)
    write_day(tmp_path, 2)
    child = os.fork()
    if not child:
        killer, write, state = Killer(at), column_files._write, column_files.write_json

        def writes(arrays, before, sizes, files, stack):  # type: ignore[no-untyped-def]
            for name, array in arrays.items():
                write({name: array}, before, sizes, files, stack)
                files[name].flush()
                killer.write(before.path(name), b"half of a row")

        def states(path: Path, value: object) -> None:
            killer.write(path.with_suffix(".partial"), b"{}")
            state(path, value)

        column_files._write, column_files.write_json = writes, states
        opened(tmp_path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (-signal.SIGKILL, 0)
    read.clear()
    found = opened(tmp_path).training.store
    if os.waitstatus_to_exitcode(status):
        assert read == (["day_1.jsonl", "day_2.jsonl"] if first else ["day_2.jsonl"])
    else:
        assert read == []
    assert_same(found, afresh(tmp_path, monkeypatch))


def test_columns_that_are_gone_are_written_again(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_day(tmp_path, 1)
    opened(tmp_path)
    write_day(tmp_path, 2)
    opened(tmp_path)
    [labels] = (cache_folder() / "ranking").glob("*/labels.bin")
    os.truncate(labels, 100)
    read.clear()
    assert_same(opened(tmp_path).training.store, afresh(tmp_path, monkeypatch))
    assert read[:2] == ["day_1.jsonl", "day_2.jsonl"]


def test_the_columns_of_a_file_are_those_of_all_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_files, "BATCH", 4)
    rows = [{"label": n % 2, "user_id": n % 5, "city": "c", **({"price": n / 4} if n < 6 else {})} for n in range(12)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (part,) = opened(tmp_path, "log.jsonl").training.store.summary.parts.values()
    assert (part.rows_in, part.columns) == (12, ["city", "label", "price", "user_id"])
