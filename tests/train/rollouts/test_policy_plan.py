"""What is predicted of a policy's run, and what it took."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from running import run

from stoker.runs.plan_record import read_comparison


def test_rounds_of_answers_are_predicted_and_measured(job: dict[str, Any], base: Path) -> None:
    job["train"]["micro_batch"] = 2
    ran = run(base, {**job, "steps": 4, "checkpoint": {"every": 4, "memory": 0}})
    found = read_comparison(ran.folder)
    assert found is not None and found.predicted is not None and found.measured is not None, found
    said, corpus = found.predicted, ran.prepared.corpus
    assert corpus is not None
    assert said.rollouts > 0 and "rollouts" not in said.time and said.seconds == pytest.approx(sum(said.time.values()))
    lengths = [int(corpus.sequences[i][0].row.trained.argmax()) for i in range(corpus.sequences.total(1))]
    assert said.longest == round(max(lengths) / 2 + 8)  # two answers to a prompt share it
    assert said.mean == pytest.approx(fmean(lengths) / 2 + 8)
    taken = [line["rollout_seconds"] for line in ran.folder.read_metrics()]
    assert found.measured.rollouts == pytest.approx(fmean(taken)) != 0  # one round
    assert f"; rollouts {said.rollouts:.3g} s a step, measured" in found.line()
