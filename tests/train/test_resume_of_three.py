"""A run of three processes in float32 that stopped on the way has the bits of one that did not, in every layout.

Sums of three numbers depend on their order, and so on where a buffer is cut; those of two do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click_logs import ranking_job
from running import write_job

from stoker.checkpoint.dcp_store import Store
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.run import train_run

STOPS, STEPS = (5, 12), 14  # PowerSGD compresses from step 11 on
LAYOUTS: dict[str, tuple[int, str]] = {
    "ddp": (3, "parallel.data=3"),
    "ddp, lora, accumulation": (3, "parallel.data=3 tune.method=lora train.batch=12 train.micro_batch=2"),
    "ddp, bf16": (3, "parallel.data=3 parallel.compress=bf16"),
    "ddp, powersgd": (3, "parallel.data=3 parallel.compress=powersgd"),
    "ddp, tensor": (6, "parallel.data=3 parallel.tensor=2"),
    "context": (3, "parallel.context=3"),
    "zero1": (3, "parallel.data=3 parallel.shard=zero1"),
    "zero2": (3, "parallel.data=3 parallel.shard=zero2"),
    "zero3": (3, "parallel.data=3 parallel.shard=zero3"),
    "pipeline": (6, "parallel.data=3 parallel.pipeline=2"),
    "hybrid, three replicas": (6, "parallel.data=6 parallel.shard=zero3 parallel.shard_size=2"),
    "hybrid, three shards": (6, "parallel.data=6 parallel.shard=zero2 parallel.shard_size=3"),
}


def run(path: str, output: str, last: int, overrides: str) -> None:
    base = Path(path)
    loaded = load_job(base / "job.yaml", [f"steps={last}", f"output={output}", *overrides.split()])
    prepared = prepare(loaded, base, mesh=Mesh(layout_of(loaded.job), torch.device("cpu")))
    folder = RunFolder(base / output)
    folder.path.mkdir(exist_ok=True)
    train_run(prepared, folder, base, quiet=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.often("ddp", "ddp, powersgd", "zero2")
@pytest.mark.slow
def test_a_stop_changes_no_bit(layout: str, base: Path, sft: dict[str, Any], pool: Pool) -> None:
    world, overrides = LAYOUTS[layout]
    train = {**sft["train"], "batch": 6, "schedule": "constant", "warmup": 0}
    assert_a_stop_changes_no_bit(base, {**sft, "train": train}, pool, world, overrides)


@pytest.mark.slow
def test_a_stop_changes_no_bit_of_rows_and_layers(clicks: Path, pool: Pool) -> None:
    """Layers of ranking models may be unused, for which DistributedDataParallel keeps its first buckets."""
    train = {"batch": 12, "lr": 1e-2, "precision": "fp32", "schedule": "constant", "warmup": 0}
    assert_a_stop_changes_no_bit(clicks, ranking_job(train=train), pool, 3, "parallel.data=3")


def assert_a_stop_changes_no_bit(base: Path, job: dict[str, Any], pool: Pool, world: int, overrides: str) -> None:
    write_job(base, job)
    pool.run(run, str(base), "whole", STEPS, overrides, world=world)
    for last in (*STOPS, STEPS):
        pool.run(run, str(base), "stopped", last, overrides, world=world)

    whole, stopped = (RunFolder(base / name) for name in ("whole", "stopped"))
    assert [line["loss"] for line in stopped.read_metrics()] == [line["loss"] for line in whole.read_metrics()]
    expected, state = (Store(folder.checkpoints).load(STEPS).tensors for folder in (whole, stopped))
    assert state.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(state[name], tensor)]
