"""The thread of the engines, with engines whose steps only record that they were taken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stoker.serve.engine_thread import EngineThread


class Recorder:
    """An engine that is busy for some steps, and its own decoder."""

    def __init__(self, name: str, log: list[str], steps: int) -> None:
        self.name, self.log, self.left = name, log, steps
        self.decoder = self
        self.works = False

    @property
    def busy(self) -> bool:
        return self.left > 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self.works = True
        yield
        self.works = False

    def step(self) -> None:
        assert self.works
        self.left -= 1
        self.log.append(self.name)


@pytest.fixture
def thread() -> Iterator[Any]:
    made = EngineThread()
    yield made
    made.close()


def test_busy_engines_take_steps_in_turn(thread: Any) -> None:
    """A long answer of one model does not keep those of another waiting."""
    log: list[str] = []
    thread.engines += [Recorder("a", log, 6), Recorder("b", log, 3)]
    thread.start()
    end = time.monotonic() + 10
    while len(log) < 9 and time.monotonic() < end:
        time.sleep(0.001)
    assert log == [*(["a", "b"] * 3), "a", "a", "a"]


def test_a_task_that_changes_a_model_runs_while_no_engine_is_at_work(thread: Any) -> None:
    engine = Recorder("a", [], 10**9)
    thread.engines.append(engine)
    thread.start()
    inside = thread.call(lambda: (engine.works, engine.left)).result(timeout=10)
    between = thread.call(lambda: (engine.works, engine.left), between=True).result(timeout=10)
    after = thread.call(lambda: engine.left).result(timeout=10)
    assert not between[0] and inside[1] >= between[1] >= after > 0  # it was busy before and afterwards


def test_the_error_of_a_task_is_its_callers(thread: Any) -> None:
    def fails() -> None:
        raise ValueError("no such adapter")

    thread.start()
    for between in (False, True):
        with pytest.raises(ValueError, match="no such adapter"):
            thread.call(fails, between=between).result(timeout=10)
    assert thread.alive and thread.call(lambda: 7).result(timeout=10) == 7
