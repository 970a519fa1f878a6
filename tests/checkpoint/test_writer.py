"""The background writer by itself: it commits when all parts are there and whole, and not before."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import stoker.checkpoint.writer as writer_module
from stoker.checkpoint.dcp_file_layout import DcpFileLayout
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.storage import LocalStorage
from stoker.checkpoint.writer import GIVE_UP, Writer, WriteRequest, Written
from stoker.errors import RunFailed

Process = subprocess.Popen[bytes]


@pytest.fixture
def writer() -> Iterator[Process]:
    command = [sys.executable, "-P", "-m", "stoker.checkpoint.writer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def send(writer: Process, line: WriteRequest | bytes) -> None:
    assert writer.stdin is not None
    writer.stdin.write((line if isinstance(line, bytes) else json.dumps(asdict(line)).encode()) + b"\n")
    writer.stdin.flush()


def request(tmp_path: Path, writer: Process, *, world: int) -> tuple[LocalStorage, WriteRequest]:
    """Rank 0's part of a checkpoint of step 3, without any tensor."""
    DcpFileLayout("__0_0.distcp", (), b"words").keep(tmp_path / "file_layout")
    for name in ("data", "metadata"):
        (tmp_path / name).write_bytes(b"" if name == "data" else b"meta")
    storage = LocalStorage(tmp_path / "checkpoints")
    attempt = storage.begin(3, writer.pid)
    assert attempt is not None
    data, file_layout, metadata = (str(tmp_path / name) for name in ("data", "file_layout", "metadata"))
    asked = WriteRequest(
        str(storage.place), attempt, 3, 0, world, data, file_layout, metadata, {"progress": {}}, Keep(2)
    )
    return storage, asked


def answer(writer: Process, kind: str) -> dict[str, Any]:
    """The next answer of a kind; those before it are dropped."""
    assert writer.stdout is not None
    for line in writer.stdout:
        if kind in (said := json.loads(line)):
            return dict(said)
    raise AssertionError(f"it never said {kind}")


def other_part(storage: LocalStorage, attempt: str) -> str:
    """What another rank says of its file, which it has written."""
    with storage.create(attempt, "__1_0.distcp") as file:
        file.write(b"other")
    return json.dumps(asdict(Written("__1_0.distcp", 5, "sum")))


def test_the_writer_waits_for_other_parts_and_for_whole_messages(tmp_path: Path, writer: Process) -> None:
    storage, asked = request(tmp_path, writer, world=2)
    send(writer, asked)
    answer(writer, "written")
    words = other_part(storage, asked.attempt)
    marker = tmp_path / "checkpoints" / f".partial-{asked.attempt}" / "done-1.json"
    for seen in ("", words[:7]):  # of a file system that shows a file before all of it is there
        marker.write_text(seen)
        time.sleep(0.3)
        assert storage.steps() == [] and writer.poll() is None
    marker.write_text(words)
    assert answer(writer, "committed")["committed"] == len(b"words" + b"meta" + b"other")
    assert storage.steps() == [3]
    assert set(storage.sizes(3)) == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_a_checkpoint_is_reported_before_older_ones_are_deleted(
    tmp_path: Path, writer: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many slow deletions in a store would otherwise look like a checkpoint that cannot be seen."""
    _, asked = request(tmp_path, writer, world=1)
    order: list[str] = []
    monkeypatch.setattr(writer_module, "retain", lambda *_: order.append("deletes"))
    monkeypatch.setattr(Writer, "_say", lambda _, **said: order.append(str(list(said)[1])))
    Writer()._serve(asked)
    assert order == ["written", "committed", "deletes", "retained"]


def test_a_write_can_be_abandoned(tmp_path: Path, writer: Process) -> None:
    storage, asked = request(tmp_path, writer, world=2)
    send(writer, asked)
    answer(writer, "written")
    send(writer, GIVE_UP)
    assert "could not write its part" in answer(writer, "error")["error"]
    assert list(storage.place.iterdir()) == []


@pytest.mark.parametrize("comes", [True, False])
def test_a_writer_whose_run_has_ended_waits_a_while_for_other_parts(
    comes: bool, tmp_path: Path, writer: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, asked = request(tmp_path, writer, world=2)
    monkeypatch.setattr(writer_module, "ORPHANED", 60.0 if comes else 0.2)
    monkeypatch.setattr(writer_module, "has_input", lambda *_: True)
    monkeypatch.setattr("os.read", lambda *_: b"")  # the end of its input
    saying: list[dict[str, Any]] = []
    monkeypatch.setattr(Writer, "_say", lambda _, **said: saying.append(said))
    marker = tmp_path / "checkpoints" / f".partial-{asked.attempt}" / "done-1.json"
    words = other_part(storage, asked.attempt)
    late = threading.Timer(0.3, marker.write_text, (words,))
    if comes:
        late.start()
        Writer()._serve(asked)
        assert storage.steps() == [3]
    else:
        with pytest.raises(RunFailed, match="has not written its part"):
            Writer()._serve(asked)
        assert list(storage.place.iterdir()) == []


def test_a_step_that_is_there_already_leaves_nothing_of_another_attempt(tmp_path: Path, writer: Process) -> None:
    storage, asked = request(tmp_path, writer, world=1)
    shutil.copytree(storage.place / f".partial-{asked.attempt}", storage.place / "step-00000003")
    (storage.place / "step-00000003" / "kept").write_text("earlier")
    send(writer, asked)
    assert answer(writer, "committed")["committed"] == 0
    answer(writer, "retained")
    assert [path.name for path in storage.place.iterdir()] == ["step-00000003"]
    assert (storage.place / "step-00000003" / "kept").read_text() == "earlier"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_written_before_an_error_is_removed_by_the_first_process(
    rank: int, tmp_path: Path, writer: Process
) -> None:
    storage, asked = request(tmp_path, writer, world=2)
    (tmp_path / "file_layout").unlink()
    send(writer, replace(asked, rank=rank))
    assert answer(writer, "error")["errno"] == errno.ENOENT
    assert len(list(storage.place.iterdir())) == rank  # others may still be writing their parts


def test_a_file_that_others_cannot_see_is_told(tmp_path: Path, writer: Process) -> None:
    storage, asked = request(tmp_path, writer, world=2)
    with storage.create(asked.attempt, "done-1.json") as file:
        file.write(json.dumps(asdict(Written("__1_0.distcp", 5, "sum"))).encode())
    send(writer, asked)
    assert "folder that all machines share" in answer(writer, "error")["error"]
    assert storage.steps() == [] and list(storage.place.iterdir()) == []


def test_the_writer_imports_no_torch() -> None:
    """It is to start in an instant, beside every process of a run, and to leave the memory to them."""
    heavy = "[name for name in ('torch', 'numpy', 'psutil', 'pydantic') if name in sys.modules]"
    code = f"import sys, stoker.checkpoint.writer; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
