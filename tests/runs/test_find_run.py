"""The errors for a path that is no run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.errors import UserError
from stoker.runs.find_run import find_run
from stoker.runs.run_folder import RunFolder


@pytest.mark.parametrize(("path", "says"), [
    ("chain", "chain has the runs of a job's stages; give one of them: runs/chain/sft, runs/chain/align"),
    ("runs/chain", "runs/chain has the runs of a job's stages; give one of them: runs/chain/sft, runs/chain/align"),
    ("runs/chain/alig", "there is no run runs/chain/alig; did you mean runs/chain/align?"),
])  # fmt: skip
def test_the_runs_of_stages_are_named(path: str, says: str, tmp_path: Path) -> None:
    for name in ("sft", "align"):
        run = RunFolder(tmp_path / "runs" / "chain" / name)
        run.path.mkdir(parents=True)
        run.write_job("task: sft\n")
        run.event("started")
    stages = [{"name": n, "run": f"runs/chain/{n}", "task": "sft", "needs": []} for n in ("sft", "align")]
    (tmp_path / "runs" / "chain" / "stages.json").write_text(json.dumps(stages))
    assert find_run("chain/align", tmp_path).path.name == "align"
    with pytest.raises(UserError) as raised:
        find_run(path, tmp_path)
    assert str(raised.value.problems[0]) == says
