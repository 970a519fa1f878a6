"""What a plan of a policy leaves out is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli.main import main

JOB = "model: smollm2-135m\ndata: asked.jsonl\nsteps: 4\ntune: lora\n"


@pytest.mark.parametrize(("task", "says"), [("task: grpo\ngrpo: {rewards: numeric}\n", True), ("task: sft\n", False)])
def test_a_plan_says_that_sampling_is_not_in_it(
    task: str, says: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(task + JOB)
    assert main(["plan", "job.yaml", "--on", "h100", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("rollout_seconds" in note for note in notes) is says
