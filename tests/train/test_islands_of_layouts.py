"""Islands of each inner layout train a language model as islands of one process do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import write_job

from stoker.checkpoint.dcp_store import Store
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.run import train_run

LAYOUTS = {
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2", "train.micro_batch=1"],
    "context": ["parallel.context=2"],
    "copies": ["parallel.data=4", "parallel.sync.islands=2"],
    "zero2": ["parallel.data=4", "parallel.shard=zero2", "parallel.shard_size=2"],
}


def run(path: str, name: str, overrides: list[str]) -> None:
    base = Path(path)
    loaded = load_job(base / "job.yaml", overrides)
    prepared = prepare(loaded, base, mesh=Mesh(layout_of(loaded.job), torch.device("cpu")))
    folder = RunFolder(base / name)
    folder.path.mkdir(exist_ok=True)
    with in_float64():
        train_run(prepared, folder, base, quiet=True)


@pytest.mark.pool
@pytest.mark.slow  # six runs of several processes
@pytest.mark.exhaustive
def test_inner_layouts(pool: Pool, sft: dict[str, Any], base: Path) -> None:
    train = {**sft["train"], "precision": "fp64", "batch": 8, "clip": 0.0}
    sync = {"every": 2, "outer_lr": 0.8, "outer_momentum": 0.5}
    write_job(base, {**sft, "steps": 5, "train": train, "parallel": {"data": 2, "sync": sync}})
    pool.run(run, str(base), "plain", [], world=2)
    expected = Store(RunFolder(base / "plain").checkpoints).load(5).tensors
    losses = [line["loss"] for line in RunFolder(base / "plain").read_metrics()]
    for name, words in LAYOUTS.items():
        pool.run(run, str(base), name, words, world=4)
        folder = RunFolder(base / name)
        assert [line["loss"] for line in folder.read_metrics()] == pytest.approx(losses, rel=1e-9), name
        found = Store(folder.checkpoints).load(5).tensors
        assert set(found) == set(expected)
        for key, tensor in found.items():
            assert torch.allclose(tensor, expected[key], rtol=1e-6, atol=1e-9), (name, key)
