"""Jobs with float8 products train as without them, nearly, alone and under layouts, and go on to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import run, write_job

from stoker.job.load_job import JobError, load_job
from stoker.runs.plan_record import read_comparison
from stoker.runs.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("warm_processes")


def float8_job(sft: dict[str, Any], recipe: str, **changes: Any) -> dict[str, Any]:
    return {
        **sft,
        "tune": "full",
        "steps": 6,
        "train": {**sft["train"], "float8": recipe, "precision": "fp32"},
        **changes,
    }


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(folder).read_metrics()]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_losses_are_near_those_without(base: Path, sft: dict[str, Any], recipe: str) -> None:
    run(base, float8_job(sft, "none", output="plain"))
    ran = run(base, float8_job(sft, recipe, output="rounded"))
    assert ran.prepared.facts["float8"].startswith(f"{recipe}, imitated on this processor")
    found = read_comparison(ran.folder)
    assert found is not None and found.predicted is not None and found.predicted.precision == "fp8"
    plain, rounded = losses(base / "plain"), losses(base / "rounded")
    assert plain != rounded
    assert rounded == pytest.approx(plain, rel=0.02)


def test_what_float8_does_not_go_with_is_told_at_the_job(base: Path, sft: dict[str, Any]) -> None:
    for tune, precision, key in (("lora", "fp32", "tune"), ("full", "fp16", "train.precision")):
        job = float8_job(sft, "rowwise", tune=tune)
        job["train"]["precision"] = precision
        with pytest.raises(JobError) as caught:
            load_job(write_job(base, job))
        assert any(problem.key in ("train.float8", key) for problem in caught.value.problems)


@pytest.mark.slow  # four commands with processes of their own
def test_layouts_train_with_them(base: Path, sft: dict[str, Any]) -> None:
    job = str(write_job(base, float8_job(sft, "rowwise")))
    layouts = {"one": [], "zero3": ["data=2", "shard=zero3"], "tensor": ["tensor=2"], "pipeline": ["pipeline=2"]}
    for name, keys in layouts.items():
        words = ["train", job, f"output={name}", *(f"parallel.{key}" for key in keys)]
        command = [sys.executable, "-m", "stoker", *words]
        done = subprocess.run(command, cwd=base, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in layouts:
        assert losses(base / name) == pytest.approx(losses(base / "one"), rel=0.02), name
