"""Keys of a job that may change during a run."""

from __future__ import annotations

import pytest

from stoker.job.changed_keys import differences
from stoker.job.keys.key_paths import flat


@pytest.mark.parametrize(
    "key",
    ["data.0.max_dropped", "evaluate.data.3.max_dropped", "export.sync", "export.sync.to", "faults.lost", "steps"],
)
def test_a_key_that_changes_no_step_may_change(key: str) -> None:
    assert differences({key: None}, {key: 0.3}) == []


@pytest.mark.parametrize("key", ["data[0].path", "data[0].weight", "train.lr", "ranking.max_dropped", "exports"])
def test_any_other_key_is_a_difference(key: str) -> None:
    flat = key.replace("[0]", ".0")
    assert differences({flat: 1}, {flat: 2}) == [f"{key} was 1 and is 2"]


def test_a_block_that_only_one_job_has_is_one_difference() -> None:
    old = {"data.0.path": "a", "data.0.template": "auto", "grpo.rewards.a.py:f": 1, "evaluate.fraction": 0}
    new = {
        "data.0.path": "a",
        **{f"data.0.template.{role}": "x" for role in ("user", "assistant")},
        **{f"evaluate.data.0.{key}": "x" for key in ("path", "format", "split")},
        **{"grpo.rewards.a.py:f": 1, "grpo.rewards.b.py:g": 1, "evaluate.fraction": 0},
    }
    assert differences(old, new) == [
        "data[0].template was 'auto' and is a block",
        "evaluate.data was added",
        "grpo.rewards.b.py:g was not set and is 1",
    ]


def test_a_key_of_a_named_entry_is_shown_with_its_name() -> None:
    old, new = ({"ranking.features.0.name": "price", "ranking.features.0.kind": kind} for kind in ("id", "dense"))
    assert differences(old, new) == ["ranking.features[0].kind (price) was 'id' and is 'dense'"]


@pytest.mark.parametrize(("old", "new", "shown"), [
    ([], ["note"], "was not set and is ['note']"),
    (["age"], ["age", "note"], "was ['age'] and is ['age', 'note']"),
    (["age"], [], "was ['age'] and is not set"),
])  # fmt: skip
def test_a_list_of_values_is_shown_whole(old: list[str], new: list[str], shown: str) -> None:
    before, after = (flat({"ranking": {"label": "clicked", "ignore": names}}) for names in (old, new))
    assert differences(before, after) == [f"ranking.ignore {shown}"]
