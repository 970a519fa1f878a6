"""Keys of a job that may change during a run."""

from __future__ import annotations

import pytest

from stoker.train.resume_check import differences


@pytest.mark.parametrize(
    "key",
    ["data.0.max_dropped", "evaluate.data.3.max_dropped", "export.sync", "export.sync.to", "faults.lost", "steps"],
)
def test_a_key_that_changes_no_step_may_change(key: str) -> None:
    assert differences({key: None}, {key: 0.3}) == []


@pytest.mark.parametrize("key", ["data.0.path", "data.0.weight", "train.lr", "ranking.max_dropped", "exports"])
def test_any_other_key_is_a_difference(key: str) -> None:
    assert differences({key: 1}, {key: 2}) == [f"{key} was 1 and is 2"]
