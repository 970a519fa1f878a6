"""A run that breaks under one layout goes on under another, from the disk or from memory, as if nothing had been.

In double precision its losses and weights are those of a run of one process that nothing happened to, and every
sample is seen once.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from running import watching, write_job, write_rows
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.state import State
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_memory import shared_memory
from stoker.runs.step_metrics import StepMetrics
from stoker.train.hooks import Hook
from stoker.train.prepare import prepare
from stoker.train.run import train_run

STEPS, BROKEN, BATCH = 6, 4, 8
ONE = (1, ())
ZERO3 = (4, ("parallel.data=4", "parallel.shard=zero3"))
TENSOR = (2, ("parallel.tensor=2",))
ZERO2 = (2, ("parallel.data=2", "parallel.shard=zero2"))
THREE_D = (8, ("parallel.data=2", "parallel.tensor=2", "parallel.pipeline=2"))
TUNES: dict[str, dict[str, Any]] = {"full": {"method": "full"}, "lora": {"method": "lora", "rank": 4}}
# layout until it breaks, layout from then on, what is tuned, from where it goes on
PAIRS = [
    (ZERO3, TENSOR, "full", "disk"),
    pytest.param(ZERO3, TENSOR, "lora", "memory", marks=pytest.mark.exhaustive),
    pytest.param(ZERO3, ONE, "full", "memory", marks=pytest.mark.exhaustive),
    pytest.param(ZERO3, ONE, "lora", "disk", marks=pytest.mark.exhaustive),
    (ZERO3, THREE_D, "full", "memory"),
    (THREE_D, ZERO3, "lora", "disk"),
    pytest.param(THREE_D, ZERO2, "full", "memory", marks=pytest.mark.exhaustive),
    (ONE, ZERO3, "full", "disk"),
]


class Broken(Exception):
    """What happens to all processes at once."""


Seen = dict[int, set[tuple[int, int]]]  # spans of samples that were read, by step


def train(path: str, overrides: tuple[str, ...], breaks: bool) -> Seen:
    """Trains to the end, or until it breaks after a step whose state is not saved yet."""
    base = Path(path)
    loaded = load_job(base / "job.yaml", overrides)
    layout = layout_of(loaded.job)
    mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
    prepared = prepare(loaded, base, mesh=mesh)
    folder = RunFolder(base / loaded.job.output)
    folder.path.mkdir(exist_ok=True)
    seen: Seen = {}
    at = [0]  # the step under way
    watching(lambda first, last, _: seen.setdefault(at[0], set()).add((first, last)))(prepared)

    def begin(step: int) -> None:
        at[0] = step

    def on_step(metrics: StepMetrics) -> None:
        if breaks and metrics.step == BROKEN:
            raise Broken

    with suppress(Broken), in_float64():
        train_run(prepared, folder, base, quiet=True, hooks=[Hook(before_passes=begin, after_step=on_step)])
    return seen


def write(base: Path, model: str, sft: dict[str, Any], tune: str) -> None:
    """A job in a folder, of a model with four blocks and a tied head."""
    write_rows(base / "rows.jsonl", 40)
    shutil.copytree(model, base / "model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model, num_hidden_layers=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(base / "model")
    train = {**sft["train"], "batch": BATCH, "precision": "fp64", "clip": 0.5}
    changes = {"model": str(base / "model"), "steps": STEPS, "train": train, "tune": TUNES[tune]}
    write_job(base, {**sft, **changes, "checkpoint": {"every": 2, "keep": 9, "memory": 1}})


@dataclass(frozen=True)
class Whole:
    """A run that nothing happened to."""

    losses: list[float]
    state: State


@pytest.fixture(scope="module")
def wholes() -> dict[str, Whole]:
    return {}


@pytest.fixture
def whole(request: pytest.FixtureRequest, wholes: dict[str, Whole], base: Path, sft: dict[str, Any]) -> Whole:
    tune = request.node.callspec.params["tune"]
    write(base, sft["model"], sft, tune)
    if tune not in wholes:
        train(str(base), ("output=whole", "checkpoint.background=false"), False)
        folder = RunFolder(base / "whole")
        losses = [line["loss"] for line in folder.read_metrics()]
        wholes[tune] = Whole(losses, Store(folder.checkpoints).load(STEPS))
    return wholes[tune]


@pytest.mark.parametrize(("before", "after", "tune", "where"), PAIRS)
@pytest.mark.often("before4")
def test_a_resumed_run_equals_an_uninterrupted_one(
    before: tuple[int, tuple[str, ...]],
    after: tuple[int, tuple[str, ...]],
    tune: str,
    where: str,
    whole: Whole,
    base: Path,
    pool: Pool,
) -> None:
    def on(layout: tuple[int, tuple[str, ...]], breaks: bool) -> Seen:
        world, overrides = layout
        told = pool.run(train, str(base), overrides, breaks, world=world, timeout=250)
        return {step: set().union(*(seen.get(step, set()) for seen in told)) for step in range(1, STEPS + 1)}

    (base / "run").mkdir()
    with shared_memory(base / "run") if where == "memory" else nullcontext():
        first, second = on(before, True), on(after, False)

    folder = RunFolder(base / "run")
    (resumed,) = [event for event in folder.read_events() if event["event"] == "resumed"]
    assert (resumed["where"], resumed["step"]) == (where, BROKEN - 1 if where == "memory" else 2)
    saved = [event for event in folder.read_events() if event["event"] == "saved" and event["where"] == "disk"]
    assert [event["step"] for event in saved if event["step"] > 2] == [4, 6]
    assert all(0 <= event["stall"] <= event["seconds"] for event in saved)

    assert [line["loss"] for line in folder.read_metrics()] == pytest.approx(whole.losses, abs=1e-10, rel=0)
    state = Store(folder.checkpoints).load(STEPS)
    assert state.tensors.keys() == whole.state.tensors.keys()
    for name, tensor in whole.state.tensors.items():
        torch.testing.assert_close(state.tensors[name], tensor, rtol=1e-8, atol=1e-10, msg=name)

    # What was read by steps that count, of the first part those before the state that the second went on from.
    spans = [span for step, found in first.items() if step <= resumed["step"] for span in found]
    spans += [span for found in second.values() for span in found]
    samples = sorted(sample for span in spans for sample in range(*span))
    assert samples == list(range(STEPS * BATCH))
    assert state.numbers["progress"]["samples"] == STEPS * BATCH
