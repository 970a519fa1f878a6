"""``stoker plan JOB``: the plan, as words and as JSON; what cannot fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli.main import main

JOB = """
task: pretrain
model: {model}
data: none.jsonl
steps: 10
train: {{seq_len: 2048, batch: 32}}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(model="llama3-8b"))
    return path


def test_the_plan_as_json(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--on", "8xH100", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    plan = result["plan"]
    layout = plan["layout"]
    assert layout["data"] * layout["tensor"] * layout["pipeline"] * layout["context"] == 8
    assert layout["data"] * plan["micro_batch"] * plan["accumulation"] == 32
    assert plan["memory_gib"] == pytest.approx(sum(plan["memory"].values()))
    assert plan["step_time_s"] == pytest.approx(sum(plan["time"].values()))
    assert plan["memory_gib"] < plan["memory_upper_gib"] <= plan["capacity_gib"]
    assert all(other["step_time_s"] >= plan["step_time_s"] for other in result["alternatives"])


def test_the_plan_in_words(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--on", "8xH100"]) == 0
    out = capsys.readouterr().out
    assert "8 x H100" in out and "8.03 billion parameters" in out and "activations" in out and "others" in out


def test_what_cannot_fit_exits_with_3(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--on", "1xT4"]) == 3
    assert "nothing fits; the nearest is" in capsys.readouterr().err


def test_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert "no job is given" in capsys.readouterr().err
