"""Losses of a ranking job with a layout, for the pool of processes."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch

from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.run import train_run


def steps_in_layout(path: str, steps: int, overrides: tuple[str, ...]) -> list[float]:
    base = Path(path)
    loaded = load_job(base / "job.yaml", [f"steps={steps}", *overrides])
    layout = layout_of(loaded.job)
    mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
    prepared = prepare(loaded, base, mesh=mesh)
    folder = RunFolder(base / loaded.job.output)
    folder.path.mkdir(exist_ok=True)
    with in_float64():
        train_run(prepared, folder, base, quiet=True)
    return [line["loss"] for line in folder.read_metrics()] + [
        event["loss"] for event in folder.read_events() if event["event"] == "evaluated"
    ]


def steps_with_small_parts(path: str, steps: int, overrides: tuple[str, ...]) -> list[float]:
    """Evaluates 7 rows in a forward pass, and two passes of each process at a time."""
    samples = patch("stoker.train.ranking.ranking_task.EVALUATION_SAMPLES", 7)
    with samples, patch("stoker.train.evaluate.TOGETHER", 2):
        return steps_in_layout(path, steps, overrides)
