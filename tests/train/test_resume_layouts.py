"""A run goes on under another layout than it began under, and ends where one process would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import write_job

from stoker.checkpoint.store import Store
from stoker.checkpoint.tuned import open_run
from stoker.job.layout import layout_of
from stoker.job.load import load_job
from stoker.launch.pool import Pool
from stoker.parallel.exactly import in_float64
from stoker.parallel.mesh import Mesh
from stoker.runs.folder import RunFolder
from stoker.train.run import prepare, start

LAYOUTS = {
    "one process": (1, ()),
    "zero2 over 2": (2, ("parallel.data=2", "parallel.shard=zero2")),
    "tensor 2 x zero3 over 2": (4, ("parallel.data=2", "parallel.shard=zero3", "parallel.tensor=2")),
    "pipeline 2 x zero1 over 2": (4, ("parallel.data=2", "parallel.shard=zero1", "parallel.pipeline=2")),
    "zbv": (2, ("parallel.pipeline=2", "parallel.schedule=zbv")),
    "context 2 x tensor 2": (4, ("parallel.context=2", "parallel.tensor=2")),
}


def run(path: str, steps: int, overrides: tuple[str, ...]) -> None:
    base = Path(path)
    with in_float64():
        loaded = load_job(base / "job.yaml", [f"steps={steps}", *overrides])
        layout = layout_of(loaded.job)
        mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
        prepared = prepare(loaded, base, mesh=mesh)
        folder = RunFolder(base / "run")
        folder.path.mkdir(exist_ok=True)
        start(prepared, folder, base, quiet=True)


@pytest.fixture
def job(sft: dict[str, Any], base: Path) -> Path:
    train = {**sft["train"], "precision": "fp64", "schedule": "constant", "warmup": 0, "clip": 0.5}
    held_out = {"fraction": 0.2, "every": 2}  # evaluated right before each checkpoint
    model = {"path": sft["model"]} if isinstance(sft["model"], Path) else sft["model"]
    write_job(base, {**sft, "model": model, "train": train, "evaluate": held_out, "checkpoint": {"every": 2}})
    return base


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one process", "tensor 2 x zero3 over 2"),
        ("tensor 2 x zero3 over 2", "zero2 over 2"),
        ("zero2 over 2", "pipeline 2 x zero1 over 2"),
        ("pipeline 2 x zero1 over 2", "zbv"),
        ("zbv", "context 2 x tensor 2"),
        ("context 2 x tensor 2", "one process"),
    ],
)
def test_it_goes_on_under_another_layout(before: str, after: str, job: Path, tmp_path: Path, pool: Pool) -> None:
    run(str(job), 4, ())
    expected = Store(job / "run" / "checkpoints").load(4)
    (job / "run").rename(job / "whole")

    for steps, name in ((2, before), (4, after)):
        world, overrides = LAYOUTS[name]
        pool.run(run, str(job), steps, overrides, world=world)
    assert Store(job / "run" / "checkpoints").steps()[0] == 2
    state = Store(job / "run" / "checkpoints").load(4)

    assert state.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(state.tensors[name], tensor, rtol=1e-9, atol=1e-10, msg=name)
    assert state.numbers["progress"]["samples"] == expected.numbers["progress"]["samples"]
    tuned = open_run("run", job)
    for name, parameter in tuned.model.named_parameters():
        torch.testing.assert_close(parameter.double(), expected.tensors[f"model/{name}"], rtol=1e-6, atol=1e-6)
