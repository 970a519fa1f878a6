"""The split of a run's time against histories whose every second is known."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.cli.main import main
from stoker.runs.goodput import DESCRIPTIONS, RunningGoodput, goodput
from stoker.runs.run_folder import RunFolder


class History:
    """A run's records, written as time passes."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.folder, self.now, self.step_number = RunFolder(path), 1000.0, 0
        self.lines: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def event(self, name: str, **values: Any) -> None:
        self.events.append({"time": self.now, "event": name, **values})

    def start(self, name: str, seconds: float) -> None:
        began = self.now
        self.now += seconds
        self.event(name, began=began)

    def step(
        self,
        seconds: float = 2.0,
        data: float = 0.5,
        stall: float = 0.0,
        loss: float | None = 1.0,
        grad_norm: float | None = 1.0,
    ) -> None:
        self.now += stall + seconds
        self.step_number += 1
        line = {"step": self.step_number, "loss": loss, "grad_norm": grad_norm, "time": self.now, "seconds": seconds}
        self.lines.append({**line, "data_seconds": data, "stall": stall})

    def write(self, *, repeated: int = 0) -> RunFolder:
        for path, lines in (
            (self.folder.metrics, self.lines[repeated:]),
            (self.folder.repeated, self.lines[:repeated]),
            (self.folder.events, self.events),
        ):
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.folder


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "run")


def split(folder: RunFolder) -> dict[str, float]:
    """The causes with a share, and that they add up."""
    found = goodput(folder)
    assert found is not None
    assert sum(found.parts.values()) == pytest.approx(found.wall)
    assert found.effective == pytest.approx(found.parts["productive"] / found.wall)
    return {cause: round(seconds, 6) for cause, seconds in found.parts.items() if seconds > 1e-6}


def test_a_run_without_trouble(history: History) -> None:
    history.start("started", 10)
    history.now += 1
    history.step()
    history.now += 3
    history.event("evaluated", seconds=3)
    history.now += 4
    history.event("saved", seconds=4)  # told by the next step
    history.step(stall=0.0)
    history.lines[-1]["stall"] = 4.0
    history.now += 0.25
    history.now += 2
    history.event("done", stall=2)
    folder = history.write()
    assert split(folder) == {
        "start_up": 11,
        "productive": 3,
        "data": 1,
        "evaluation": 3,
        "checkpoint": 6,
        "other": 0.25,
    }
    found = goodput(folder)
    assert found is not None and found.first_step == 10 + 1 + 2


def test_a_fault_and_what_was_done_again(history: History) -> None:
    history.start("started", 5)
    history.step()
    history.step()
    history.now += 1.5  # in the middle of step 3
    history.event("fault", rank=1)
    history.start("resumed", 4)
    history.step()
    history.event("restarted", seconds=6)
    history.step()
    history.event("done")
    assert split(history.write(repeated=1)) == {
        "start_up": 5,
        "recomputation": 2,
        "productive": 4.5,
        "data": 1.5,
        "recovery": 5.5,
    }


def test_a_lost_node_and_one_that_joins(history: History) -> None:
    """With several nodes: those that are left restart; where a node joins, all resume together and repeat no step."""
    history.event("group", generation=1, world=4, nodes={"a": [0, 1], "b": [2, 3]})
    history.start("started", 5)
    history.step()
    history.now += 1.5
    history.event("node_lost", node="b", ranks=[2, 3], step=1)
    history.event("fault", rank=2, node="b", cause="exit")
    history.now += 1
    history.event("group", generation=2, world=2, nodes={"a": [0, 1]})
    history.start("resumed", 4)
    history.step()
    history.event("restarted", seconds=6.5)
    history.now += 0.25
    history.event("paused", step=2)
    history.event("regrouped", step=2)
    history.event("group", generation=3, world=4, nodes={"a": [0, 1], "c": [2, 3]})
    history.start("resumed", 3)
    history.step()
    history.event("done")
    assert split(history.write()) == {"start_up": 5, "productive": 4.5, "data": 1.5, "recovery": 6.5 + 3.25}


def test_killed_with_nobody_to_see_it(history: History) -> None:
    history.start("started", 5)
    history.step()
    history.now += 100
    history.start("resumed", 4)
    history.step()
    assert split(history.write()) == {"start_up": 5, "productive": 3, "data": 1, "recovery": 104}


def test_time_in_which_it_was_stopped_on_purpose_is_not_counted(history: History) -> None:
    history.start("started", 5)
    history.step()
    history.event("stopped", stall=0.0)
    history.now += 3600
    history.event("checked")
    history.start("resumed", 4)
    history.step()
    history.event("done")
    found = goodput(history.write())
    assert found is not None and found.wall == 13
    assert split(history.folder) == {"start_up": 9, "productive": 3, "data": 1}


def test_what_bad_numbers_cost(history: History) -> None:
    history.start("started", 5)
    history.step(loss=None)  # left out
    history.step(grad_norm=None)  # also left out: the loss is finite
    history.now += 2
    history.event("not_finite", seconds=2)  # tried again
    history.step()
    history.now += 3
    history.event("rolled_back", seconds=1)
    history.step()
    assert split(history.write()) == {
        "start_up": 5,
        "left_out": 3,
        "recomputation": 2,
        "productive": 3,
        "data": 2,
        "recovery": 3,
    }


def test_without_a_step_or_its_time_there_is_none(history: History) -> None:
    history.start("started", 5)
    assert goodput(history.write()) is None
    history.step()
    history.lines = [{"step": 1, "loss": 1.0, "seconds": 2.0}]  # of a version that wrote no times
    assert goodput(history.write()) is None


def test_impossible_times_are_none(history: History) -> None:
    history.start("started", 5)
    history.step()
    expected = goodput(history.write())
    history.lines.append({"step": 1e308, "loss": 1, "time": 1e308, "seconds": 1e308})
    history.events += [{"event": "done", "time": 1e308}, {"event": "resumed", "time": history.now, "began": -1e308}]
    found = goodput(history.write())
    assert found is not None and expected is not None and found.wall == expected.wall
    history.lines, history.events = [{"step": 1, "loss": 1, "time": 5.0, "seconds": 2.0}], []
    history.write()  # no two times that differ
    assert main(["runs", str(history.folder.path)]) == 0


def test_lines_with_fewer_fields_are_read(history: History) -> None:
    history.start("started", 4.0)
    history.step(seconds=2.0)
    history.step(seconds=3.0)
    for name in ("data_seconds", "stall"):
        del history.lines[-1][name]
    history.now += 1.0
    history.lines.append({"step": 3, "loss": 1.0, "grad_norm": 1.0, "time": history.now})
    found = goodput(history.write())
    assert found is not None and found.wall == 9.0
    assert found.parts["productive"] == 1.5 + 3.0 and found.parts["data"] == 0.5


def test_while_it_trains_it_says_the_same(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a fault, with steps that were done again."""
    history.start("started", 5)
    history.step()
    history.step()
    history.event("fault")
    history.start("resumed", 4)
    running = RunningGoodput(history.write(repeated=1))
    history.step(stall=0.25)
    monkeypatch.setattr(time, "time", lambda: history.now)
    found = goodput(history.write(repeated=1))
    assert found is not None and running.after(1.5) == pytest.approx(found.effective)
    assert found.effective == pytest.approx(3 / 15.25)


NAMES = st.sampled_from(
    ["started", "resumed", "done", "stopped", "fault", "hung", "failed", "evaluated", "sampled", "saved", "rolled_back"]
)
MOMENT = st.tuples(NAMES | st.just("step"), st.floats(0, 50), st.floats(0, 50), st.floats(0, 50))


@settings(deadline=None)  # files are written
@given(st.lists(MOMENT, min_size=1, max_size=30))
def test_any_history_adds_up(moments: list[tuple[str, float, float, float]]) -> None:
    """Also one with records that claim more than there was."""
    import tempfile

    with tempfile.TemporaryDirectory() as base:
        history = History(Path(base) / "run")
        for name, passes, seconds, more in moments:
            history.now += passes
            if name == "step":
                history.step(seconds, min(seconds, more), more)
                history.now -= more
            else:
                history.event(name, seconds=seconds, stall=more, began=history.now - more)
        history.step()
        found = goodput(history.write())
        assert found is not None and set(found.parts) == set(DESCRIPTIONS)
        assert sum(found.parts.values()) == pytest.approx(found.wall, abs=1e-6)
        assert min(found.parts.values()) >= 0 and 0 <= found.effective <= 1
