"""Batches that are laid out ahead are those that the steps would have laid out themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import assert_same_state, run
from test_anomaly_policy import BATCH, MODULE, bad, with_faults
from torch import nn
from torch.utils.data import TensorDataset

from stoker.models.attention.collate import pack
from stoker.train.batches import Batches
from stoker.train.faults.skipped_samples import Span
from stoker.train.module.module_task import ModuleTask
from stoker.train.prepared import Prepared
from stoker.train.single_process import SingleProcess
from stoker.train.task import Part

CPU = torch.device("cpu")


class Numbers:
    """A task whose parts are the numbers of their samples."""

    lays_out_ahead = True

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.threads: set[str] = set()
        self.laid_out = threading.Semaphore(0)

    def parts(self, first: int, last: int) -> list[Part]:
        self.asked.append((first, last))
        self.threads.add(threading.current_thread().name)
        self.laid_out.release()
        if first == 13:
            raise ValueError("sample 13 cannot be read")
        return [Part((first, last), targets=1, tokens=1)]


def take(batches: Batches, span: Span, following: Span | None) -> list[Part]:
    parts = batches.take(span)
    if following is not None:
        batches.lay_out_ahead([following])
    return parts


@pytest.fixture
def task() -> Numbers:
    return Numbers()


@pytest.fixture
def batches(task: Numbers) -> Iterator[Batches]:
    passes = SingleProcess(task, None, [])  # type: ignore[arg-type]
    with Batches(task, passes, CPU, batch=4, micro_batch=2) as batches:  # type: ignore[arg-type]
        yield batches


def samples(parts: list[Part]) -> list[object]:
    return [part.inputs for part in parts]


def test_the_next_batch_is_laid_out_while_a_step_is_at_work(task: Numbers, batches: Batches) -> None:
    assert samples(take(batches, (0, 4), (4, 8))) == [(0, 2), (2, 4)]
    for _ in range(4):  # the step is at work
        assert task.laid_out.acquire(timeout=60)
    assert task.asked == [(0, 2), (2, 4), (4, 6), (6, 8)]  # one batch ahead, and no more
    assert samples(take(batches, (4, 8), (8, 11))) == [(4, 6), (6, 8)]
    assert samples(take(batches, (8, 11), None)) == [(8, 10), (10, 11)]
    assert len(task.asked) == 6 and task.threads == {"batches_0"}


def test_other_samples_than_those_laid_out_ahead(task: Numbers, batches: Batches) -> None:
    """After going back, or where the same samples are tried again."""
    take(batches, (8, 12), (12, 16))
    assert samples(take(batches, (4, 8), (8, 12))) == [(4, 6), (6, 8)]
    assert samples(take(batches, (4, 8), (8, 12))) == [(4, 6), (6, 8)]
    assert samples(take(batches, (8, 12), None)) == [(8, 10), (10, 12)]


def test_an_error_comes_with_the_step_that_takes_the_samples(batches: Batches) -> None:
    take(batches, (9, 11), (11, 15))  # it fails in the background
    take(batches, (0, 4), (11, 15))  # which is no matter to other steps
    with pytest.raises(ValueError, match="sample 13 cannot be read"):
        take(batches, (11, 15), None)


def test_the_next_batch_can_be_seen_while_the_one_after_it_is_laid_out(task: Numbers, batches: Batches) -> None:
    batches.take((0, 4))
    batches.lay_out_ahead([(4, 8), (8, 12)])
    assert samples(batches.coming((4, 8))) == [(4, 6), (6, 8)]
    assert samples(batches.take((4, 8))) == [(4, 6), (6, 8)]
    batches.lay_out_ahead([(8, 12), (12, 13)])
    assert samples(batches.coming((8, 12))) == [(8, 10), (10, 12)]
    batches.lay_out_ahead([(12, 13)])  # the run has gone elsewhere
    with pytest.raises(KeyError):
        batches.coming((8, 12))
    assert samples(batches.take((12, 13))) == [(12, 13)] and task.asked.count((12, 13)) == 1


def test_its_thread_ends_with_the_run(base: Path) -> None:
    run(base, MODULE)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def in_the_foreground(prepared: Prepared) -> None:
    prepared.task.lays_out_ahead = False


@pytest.mark.parametrize("faults", [{}, {"not_finite": "roll-back"}, {"not_finite": "skip"}])
def test_a_run_is_the_same_as_without(faults: dict[str, str], base: Path) -> None:
    job = with_faults(**faults)
    spoil = bad(lambda first: first == 4 * BATCH, float("nan")) if faults else lambda _: None

    def both(prepared: Prepared) -> None:
        spoil(prepared)
        in_the_foreground(prepared)

    ahead, without = run(base, job, before=spoil), run(base, job, "output=without", before=both)
    assert ahead.losses == without.losses and len(ahead.losses) == 16
    assert_same_state(ahead.last_state(), without.last_state())


def test_evaluation_beside_it_changes_no_batch(base: Path, sft: dict[str, Any]) -> None:
    """With dropout equal beginnings are not shared; in evaluation, where nothing is dropped, they are."""
    ran = run(base, {**sft, "steps": 1, "tune": {"method": "lora", "dropout": 0.5}})
    task = ran.prepared.task
    tokens = []
    for training in (True, False):
        task.model.train(training)
        tokens.append([part.inputs.ids.numel() for part in task.parts(0, 16)])  # type: ignore[attr-defined]
    assert tokens[0] == tokens[1]


class Growing(TensorDataset):
    """Samples that are made as they are read."""


def test_only_what_draws_nothing_is_laid_out_ahead() -> None:
    def task(data: object) -> ModuleTask:
        return ModuleTask(nn.Linear(1, 1), lambda a, b: (a - b).mean(), data, None, seed=0, device=CPU)

    tensors = torch.zeros(4, 1), torch.zeros(4, 1)
    assert task(tensors).lays_out_ahead and task(TensorDataset(*tensors)).lays_out_ahead
    assert not task(Growing(*tensors)).lays_out_ahead


def test_a_part_goes_to_a_device_whole() -> None:
    rows = [(np.arange(5), np.ones(5, bool)), (np.arange(7), np.ones(7, bool))]
    inputs = pack(rows, CPU, share=True)
    meta = torch.device("meta")
    moved = Part(inputs, 1, 1).to(meta).inputs
    tensors = [name for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 5 and all(getattr(moved, name).device == meta for name in tensors)
    assert moved.segments == inputs.segments  # type: ignore[attr-defined]
    nested = Part(({"a": torch.ones(2), "b": [torch.ones(1), "text"]}, torch.ones(3)), 1, 1).to(meta).inputs
    assert nested[0]["a"].is_meta and nested[0]["b"][0].is_meta and nested[0]["b"][1] == "text" and nested[1].is_meta  # type: ignore[index]
