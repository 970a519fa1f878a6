"""Attempts at checkpoints: whose they are, which are left over, and what damaged ones become."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from states import assert_saved, state

from stoker.checkpoint import storage
from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.storage import LocalStorage, attempt_name, is_alive
from stoker.checkpoint.writer import commit


def test_only_another_process_of_this_machine_is_known_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = attempt_name(1, os.getppid())
    assert is_alive(attempt)
    assert not is_alive(attempt_name(1, os.getpid()))  # this one knows what it writes
    assert not is_alive(attempt_name(1, 2**22 + 1)) and not is_alive("step-00000001")
    monkeypatch.setattr(time, "time_ns", lambda: 10**9)
    assert not is_alive(attempt_name(1, os.getppid()))  # the number belonged to an earlier process
    monkeypatch.setattr(storage, "_machine", lambda: "elsewhere")
    assert not is_alive(attempt)


def test_a_checkpoint_that_is_damaged_twice_is_put_aside_twice(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for _ in range(2):
        store.save(state(1))
        aside = store.put_aside(1)
        assert store.steps() == [] and Path(aside).is_dir()
    store.save(state(1))
    assert_saved(store, 1)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_attempts_at_steps_that_the_run_repeats_are_given_up(scheme: str, tmp_path: Path) -> None:
    store = Store(f"{scheme}{tmp_path}" if scheme else tmp_path)
    store.save(state(1))
    attempts = [store.storage.begin(step, os.getppid()) for step in (2, 3, 4)]
    for attempt in attempts:
        assert attempt is not None
        with store.storage.create(attempt, "part") as file:
            file.write(b"x")
    store.forget_after(3)
    assert sorted(store.pending()) == [2, 3] and store.steps() == [1]
    store.forget_after(0)
    assert store.pending() == [] and store.steps() == []


def test_of_two_attempts_at_a_step_the_second_to_finish_is_given_up(tmp_path: Path) -> None:
    place = LocalStorage(tmp_path)
    attempts = [place.begin(3, os.getpid()) for _ in range(2)]
    sizes = [commit(place, str(attempt), step=3, parts=[], metadata=b"one", numbers={}) for attempt in attempts]
    assert sizes == [3, 0]
    assert place.steps() == [3] and len(list(tmp_path.iterdir())) == 1
