"""`parallel: auto` is remembered as a question to the planner, with what else is written of the layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import UserError
from stoker.job.load_job import load_job

SFT = "task: sft\nmodel: m\ndata: d.jsonl\n"


@pytest.mark.parametrize(
    ("text", "overrides", "planned"),
    [
        ("", [], False),
        ("parallel: auto\n", [], True),
        ("parallel:\n", [], False),
        ("parallel: {data: auto}\n", [], False),
        ("", ["parallel=auto"], True),
        ("parallel: auto\n", ["parallel.tensor=2"], True),
        ("parallel: auto\n", ["parallel={tensor: 2}"], False),
        ("parallel: {tensor: 2}\n", ["parallel=auto"], True),
        ("parallel: auto\n", ["train.lr=1e-4"], True),
    ],
)
def test_whose_choice_the_layout_is(tmp_path: Path, text: str, overrides: list[str], planned: bool) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(SFT + text)
    assert load_job(path, overrides).document.planned is planned


def test_what_hangs_on_the_planners_choice_is_not_judged_before_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(SFT)
    with pytest.raises(UserError, match="there is one"):  # data-parallel process to shard over
        load_job(path, ["parallel.shard=zero3"])
    assert load_job(path, ["parallel=auto", "parallel.shard=zero3"]).job.parallel.shard == "zero3"
