"""The time of a policy's answers in a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli.main import main

JOB = "model: smollm2-135m\ndata: asked.jsonl\nsteps: 4\ntune: lora\n"
GRPO = "task: grpo\ngrpo: {rewards: numeric, prompts: 2, answers: 8, max_tokens: 48}\n"


def test_the_rollouts_are_a_part_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(GRPO + JOB)
    assert main(["plan", "job.yaml", "--on", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan, rollouts = found["plan"], found["plan"]["rollouts"]
    assert rollouts["seconds"] == pytest.approx(sum(rollouts[f"{part}_s"] for part in ("prefill", "decode", "scoring")))
    assert plan["time"]["rollouts"] == pytest.approx(rollouts["seconds"])  # one step on each round
    assert plan["step_time_s"] == pytest.approx(sum(plan["time"].values()))
    assert (rollouts["prompts"], rollouts["answers"], rollouts["tokens"], rollouts["readings"]) == (2, 8, 48, 1)
    assert any("its share of sampling" in note for note in found["notes"])
    assert main(["plan", "job.yaml", "--on", "h100"]) == 0
    said = capsys.readouterr().out
    assert "for 1 step: 2 prompts of" in said and "8 answers of 48 each" in said and "decoding" in said


def test_prompts_that_no_layout_can_share_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(GRPO + JOB.replace("tune: lora", "tune: {method: lora, dora: true}"))
    assert main(["plan", "job.yaml", "--on", "4xh100"]) == 3  # `dora` excludes tensor parallelism
    assert "no layout can divide this batch and 2 prompts a round over these devices" in capsys.readouterr().err


def test_other_tasks_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("task: sft\n" + JOB)
    assert main(["plan", "job.yaml", "--on", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "rollouts" not in found["plan"] and "rollouts" not in found["plan"]["time"]
    assert not any("answers" in note for note in found["notes"])
