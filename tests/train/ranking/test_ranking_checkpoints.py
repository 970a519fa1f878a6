"""Checkpoints of ``task: ranking``: across layouts, of changed rows only, after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click_logs import CONSTANT, ranking_job
from running import assert_same_state, run, stop_at, write_job
from steps_in_layout import steps_in_layout

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.rows_by_id import rows_by_id
from stoker.checkpoint.tensor_names import BASE_ROWS
from stoker.data.ranking import column_kinds
from stoker.errors import RunFailed, UserError
from stoker.launch.process_pool import Pool
from stoker.train.ranking.open_run import measure_run


@pytest.mark.parametrize("rule", [{"age": 3}, {"max_rows": 12, "default_row": "mean"}], ids=str)
@pytest.mark.slow
def test_a_checkpoint_of_any_processes_is_restored_by_any_other(rule: dict[str, Any], clicks: Path, pool: Pool) -> None:
    table = {"admission": {"count": 2}, "eviction": {"every": 2, **rule}}
    write_job(clicks, ranking_job(output="alone", ranking={"table": table}, train=CONSTANT))
    alone = steps_in_layout(str(clicks), 4, ())
    write_job(clicks, ranking_job(output="changing", ranking={"table": table}, train=CONSTANT))
    for step, world in enumerate((1, 2, 3, 1), start=1):
        found = pool.run(steps_in_layout, str(clicks), step, (f"parallel.data={world}",), world=world)[0]
    assert found[:4] == pytest.approx(alone[:4], rel=1e-12)
    one, other = (Store(clicks / name / "checkpoints").load(4) for name in ("alone", "changing"))
    rows, others = rows_by_id(one.tensors), rows_by_id(other.tensors)
    assert rows.keys() == others.keys()
    assert any(len(tensor) for tensor in rows.values())
    for name, tensor in rows.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_checkpoints_of_changed_rows_are_resumed_evaluated_and_kept(clicks: Path, pool: Pool) -> None:
    table = {"admission": {"count": 2}, "eviction": {"age": 2, "every": 2, "max_rows": 20, "default_row": "mean"}}
    job = ranking_job(output="whole", ranking={"table": table}, train=CONSTANT, checkpoint={"every": 1, "best": False})
    write_job(clicks, job)
    whole = steps_in_layout(str(clicks), 6, ())
    write_job(clicks, {**job, "output": "changed", "checkpoint": {**job["checkpoint"], "full_every": 4}})
    for step, world in ((3, 2), (4, 1), (6, 2)):  # each resumed run saves all rows first
        found = pool.run(steps_in_layout, str(clicks), step, (f"parallel.data={world}",), world=world)[0]
    assert found[:6] == pytest.approx(whole[:6], rel=1e-12)
    store = Store(clicks / "changed" / "checkpoints")
    assert {step: store.numbers(step).get("base") for step in store.steps()} == {5: None, 6: 5}
    one, other = (Store(clicks / name / "checkpoints").load(6) for name in ("whole", "changed"))
    assert any(name.startswith(BASE_ROWS) for name in other.tensors)
    rows, others = rows_by_id(one.tensors), rows_by_id(other.tensors)
    assert rows.keys() == others.keys() and len(rows["user_id/ids"])
    for name, tensor in rows.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-12, atol=1e-14)
    first, second = (
        measure_run(str(clicks / name), None, "auto", at="last", trusted=(), base=clicks).means
        for name in ("whole", "changed")
    )
    assert first == pytest.approx(second, rel=1e-9)


def test_a_stopped_run_goes_on_as_if_it_had_not(clicks: Path) -> None:
    rules = {
        "admission": {"count": 2, "probability": 0.9},
        "eviction": {"max_rows": 12, "every": 1, "default_row": "mean"},
    }
    table = {**rules, "optimizer": "adam", "lr": 0.01}
    whole = run(clicks, ranking_job(ranking={"table": table}, output="whole"))
    stopped = run(clicks, ranking_job(ranking={"table": table}), before=stop_at(30))
    assert stopped.outcome.step < 6
    resumed = run(clicks, ranking_job(ranking={"table": table}))
    assert resumed.loop.resumed_from == "disk"
    assert resumed.losses == whole.losses
    assert_same_state(resumed.last_state(), whole.last_state())


@pytest.mark.parametrize("progressive", [False, True])
def test_a_resumed_run_has_the_features_that_it_recorded(
    progressive: bool, clicks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"progressive": progressive}
    whole = run(clicks, ranking_job(ranking=settings, output="whole"))
    run(clicks, ranking_job(ranking=settings), before=stop_at(30))
    recorded = (clicks / "run/features.json").read_text()
    monkeypatch.setattr(column_kinds, "_is_skewed", lambda _: False)  # as another version may detect them
    stated = {**settings, "features": [{"name": "device", "kind": "ids"}]}
    with pytest.raises(UserError, match=r"ranking.features \(device\) was added"):
        run(clicks, ranking_job(ranking=stated))
    (clicks / "run/checkpoints").rename(clicks / "aside")
    with pytest.raises(RunFailed, match="there is no checkpoint"):
        run(clicks, ranking_job(ranking=settings))
    (clicks / "aside").rename(clicks / "run/checkpoints")
    assert (clicks / "run/features.json").read_text() == recorded
    assert run(clicks, ranking_job(ranking=settings)).losses == whole.losses
    assert (clicks / "run/features.json").read_text() == recorded
