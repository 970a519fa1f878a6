"""Other data beside a policy's answers: its gradient is that of supervised training on it, times its factor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running import run, write_rows

from stoker.errors import UserError

WEIGHT = 0.25


@pytest.fixture
def alike(job: dict[str, Any], base: Path) -> dict[str, Any]:
    """A job whose answers all score alike, so that they teach nothing."""
    (base / "alike.py").write_text("def one(answer, expected, row):\n    return 1.0\n")
    write_rows(base / "beside.jsonl", 12)
    grpo = {
        **job["grpo"],
        "rewards": "python:alike:one",
        "kl": 0.0,
        "epochs": 1,
        "ptx": {"data": "beside.jsonl", "weight": WEIGHT, "sequences": 6},
    }
    train = {**job["train"], "batch": 16, "optimizer": "sgd", "clip": 0.0, "pack": False, "micro_batch": 4}
    return {**job, "grpo": grpo, "train": train, "steps": 1}


def test_its_gradient_is_that_of_supervised_training(alike: dict[str, Any], base: Path) -> None:
    mixed = run(base, alike)
    plain = {**alike, "task": "sft", "data": "beside.jsonl", "output": "sft", "evaluate": {"fraction": 0.0}}
    supervised = run(base, {**plain, "train": {**alike["train"], "batch": 6, "micro_batch": 6}}, "grpo=null")
    line, expected = mixed.folder.read_metrics()[0], supervised.folder.read_metrics()[0]
    assert line["ptx_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert line["loss"] == pytest.approx(WEIGHT * expected["loss"], rel=1e-5)
    assert line["grad_norm"] == pytest.approx(WEIGHT * expected["grad_norm"], rel=1e-4)


def test_every_sequence_comes_once(alike: dict[str, Any], base: Path) -> None:
    ran = run(base, alike)
    mix = ran.prepared.task._mix  # type: ignore[attr-defined]
    spans = [(0, 4), (4, 8), (8, 12), (12, 16)]
    parts = [mix.parts(ran.prepared.task, first, last) for first, last in spans]
    assert [sum(part.inputs.rows for part in own) for own in parts] == [1, 2, 1, 2]  # of each process, evenly
    assert mix.parts(ran.prepared.task, 16, 32)
    assert {(part.targets, part.row.balance) for own in parts for part in own} == {(0, 0.0)}


def test_a_large_source_is_tokenised_beforehand(
    alike: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.data.corpus.STREAM_ABOVE", 0)
    assert run(base, alike).folder.read_metrics()[0]["ptx_loss"] > 0


def test_a_source_that_is_not_there_is_named_at_its_key(alike: dict[str, Any], base: Path) -> None:
    with pytest.raises(UserError, match=r"`grpo\.ptx\.data=nowhere\.jsonl`: no such file"):
        run(base, alike, "grpo.ptx.data=nowhere.jsonl")
