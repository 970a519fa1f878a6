"""A run goes on under another layout than it began under, and ends where one process would have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from running import write_job
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.load_run import open_run
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.train.optim.eight_bit_states import BLOCK
from stoker.train.prepare import prepare
from stoker.train.run import train_run

# (processes, what the job file gets) of each step; every pair of neighbours hands a checkpoint on.
LAYOUTS = [
    (1, ()),
    (4, ("parallel.data=2", "parallel.shard=zero3", "parallel.tensor=2")),
    (2, ("parallel.data=2", "parallel.shard=zero2")),
    (4, ("parallel.data=2", "parallel.shard=zero1", "parallel.pipeline=2")),
    (2, ("parallel.pipeline=2", "parallel.schedule=zbv")),
    (4, ("parallel.context=2", "parallel.tensor=2")),
    (2, ("parallel.data=2",)),
    (1, ()),
]


def run(path: str, steps: int, overrides: tuple[str, ...]) -> None:
    base = Path(path)
    loaded = load_job(base / "job.yaml", [f"steps={steps}", *overrides])
    layout = layout_of(loaded.job)
    mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
    prepared = prepare(loaded, base, mesh=mesh)
    folder = RunFolder(base / "run")
    folder.path.mkdir(exist_ok=True)
    with in_float64():
        train_run(prepared, folder, base, quiet=True)


@pytest.fixture
def job(sft: dict[str, Any], base: Path) -> Path:
    """A job of a model with four blocks, enough for four stages, and a tied head."""
    shutil.copytree(sft["model"], base / "model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(sft["model"], num_hidden_layers=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(base / "model")
    train = {**sft["train"], "precision": "fp64", "schedule": "constant", "warmup": 0, "clip": 0.5, "average": 0.6}
    held_out = {"fraction": 0.2}  # evaluated at the end, right before the checkpoint
    write_job(
        base, {**sft, "model": str(base / "model"), "train": train, "evaluate": held_out, "checkpoint": {"keep": 9}}
    )
    return base


def states_in_8_bits(job: Path) -> None:
    """Each process of two has whole blocks of every matrix' rows."""
    sizes = {"hidden_size": 2 * BLOCK, "intermediate_size": 2 * BLOCK}
    config = AutoConfig.from_pretrained(job / "model", **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(job / "model")
    path = job / "job.yaml"
    path.write_text(path.read_text().replace("precision: fp64", "precision: fp64, optimizer_states: 8bit"))


@pytest.mark.parametrize("states", ["fp32", pytest.param("8bit", marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_a_run_may_change_its_layout_after_every_step(job: Path, pool: Pool, states: str) -> None:
    if states == "8bit":
        states_in_8_bits(job)
    run(str(job), len(LAYOUTS), ())
    (job / "run").rename(job / "whole")
    for step, (world, overrides) in enumerate(LAYOUTS, 1):
        if world == 1:
            run(str(job), step, overrides)
        else:
            pool.run(run, str(job), step, overrides, world=world, timeout=250)

    one, many = (RunFolder(job / name) for name in ("whole", "run"))
    expected, state = (Store(folder.checkpoints).load(len(LAYOUTS)) for folder in (one, many))
    assert [line["loss"] for line in many.read_metrics()] == pytest.approx(
        [line["loss"] for line in one.read_metrics()], abs=1e-9
    )
    assert state.tensors.keys() == expected.tensors.keys()
    assert any(tensor.dtype == torch.uint8 for tensor in state.tensors.values()) == (states == "8bit")
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(state.tensors[name], tensor, rtol=1e-8, atol=1e-9, msg=name)
    assert state.numbers["progress"]["samples"] == expected.numbers["progress"]["samples"]


def test_one_process_uses_what_many_trained(job: Path, pool: Pool) -> None:
    world, overrides = LAYOUTS[3]
    pool.run(run, str(job), 1, overrides, world=world, timeout=250)
    saved = Store(job / "run" / "checkpoints").load(1)
    for name, parameter in open_run("run", job).model.named_parameters():
        assert torch.equal(parameter, saved.tensors[f"model/{name}"].to(parameter.dtype)), name
