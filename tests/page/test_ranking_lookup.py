"""Rows of a ranking run's log, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

from browsing import Browser, make_run

from stoker.data.ranking.features import Column, Features
from stoker.data.ranking.ids import id_of


def test_rows_of_the_log_are_shown_with_the_columns_of_the_model(page: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "shop")
    (tmp_path / "runs" / "log.jsonl").write_text(
        "".join(json.dumps({"user": 2**60 + n, "tags": [2**53 + n, "a"], "clicked": 0}) + "\n" for n in range(5))
    )
    (run / "job.yaml").write_text("task: ranking\ndata: runs/log.jsonl\nranking: {label: clicked}\nsteps: 5\n")
    features = Features(("clicked",), (Column("user", "id"), Column("tags", "ids"), Column("user_tags", "cross")))
    page.page.runs.forget()
    key = page.get("/api/runs").json()["runs"][0]["id"]
    assert page.get(f"/api/runs/{key}/log-rows").status_code == 404  # no features yet
    (run / "features.json").write_text(json.dumps(features.as_json()))
    found = page.get(f"/api/runs/{key}/log-rows?offset=3&limit=9").json()
    assert found["columns"] == [{"name": "user", "kind": "id"}, {"name": "tags", "kind": "ids"}]
    assert found["labels"] == ["clicked"] and [row["row"] for row in found["rows"]] == [4, 5]
    value = found["rows"][0]["value"]
    assert id_of(value["user"]) == 2**60 + 3 and id_of(value["tags"][0]) == 2**53 + 3
    assert isinstance(value["user"], str) and value["clicked"] == 0


def test_rows_that_are_none_are_refused(page: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "shop")
    page.page.runs.forget()
    key = page.get("/api/runs").json()["runs"][0]["id"]
    for rows in (None, [], "x", [1], [{}] * 1001):
        assert page.post("/api/score", {"run": key, "rows": rows}).status_code == 400
    assert page.post("/api/score", {"run": "none", "rows": [{}]}).status_code == 404
