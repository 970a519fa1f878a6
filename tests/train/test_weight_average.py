"""The moving average of the weights: its formula, after a restart too, and where it can be asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from running import Ran, assert_same_state, run, stop_at
from torch import Tensor

from stoker.checkpoint.load_run import open_run
from stoker.errors import UserError
from stoker.runs.step_metrics import StepMetrics
from stoker.train.step_hooks.weight_average import WeightAverage

DECAY = 0.75


@pytest.fixture
def job(sft: dict[str, Any]) -> dict[str, Any]:
    checkpoint = {"every": 1, "keep": 99, "best": False}
    return {**sft, "steps": 4, "checkpoint": checkpoint, "train": {**sft["train"], "average": DECAY}}


def weights(ran: Ran, step: int) -> dict[str, Tensor]:
    tensors = ran.store.load(step).tensors
    return {k.removeprefix("model/"): t for k, t in tensors.items() if k.startswith("model/")}  # type: ignore[misc]


@pytest.mark.parametrize(
    "overrides",
    [(), ("train.optimizer=sgd", "train.beta1=0"), ("train.optimizer=adafactor",), ("parallel.offload=optimizer",)],
    ids=["adamw", "sgd", "adafactor", "offload"],
)
def test_the_average_is_that_of_the_checkpoints(overrides: tuple[str, ...], job: dict[str, Any], base: Path) -> None:
    ran = run(base, job, *overrides)
    expected = weights(ran, 1)
    for step in range(2, 5):
        now = weights(ran, step)
        expected = {name: DECAY * average + (1 - DECAY) * now[name] for name, average in expected.items()}
    tensors = ran.last_state().tensors
    for name, average in expected.items():
        torch.testing.assert_close(tensors[f"optimizer/{name}/average"], average)
        assert not torch.equal(average, now[name])


def test_the_average_of_a_parameter_starts_with_its_first_step() -> None:
    """Others have no gradient in the first steps, as in the warm-up of new embedding rows."""
    early, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([early, late], lr=0.5)
    hook, metrics = WeightAverage(optimizer, DECAY).hook(), cast(StepMetrics, None)
    for trained in ([early], [early, late]):
        for parameter in trained:
            parameter.grad = torch.ones(2)
        optimizer.step()
        hook.after_optimizer(0.5, True)
        hook.after_step(metrics)
        assert ("average" in optimizer.state.get(late, {})) == (len(trained) == 2)
    assert torch.equal(optimizer.state[late]["average"], late) and not torch.equal(late, torch.ones(2))


def test_a_step_that_is_skipped_changes_no_average() -> None:
    """Also the first one, after which a fused AdamW has moments."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    hook, metrics = WeightAverage(optimizer, DECAY).hook(), cast(StepMetrics, None)
    for taken, average in ((False, None), (True, 0.5), (True, 0.375), (False, 0.375)):
        if taken:
            weight.grad = torch.ones(2)
            optimizer.step()
        hook.after_optimizer(0.5, taken)
        hook.after_step(metrics)
        found = optimizer.state[weight].get("average")
        assert found is None if average is None else torch.equal(found, torch.full((2,), average))


def test_a_stopped_run_goes_on_with_its_averages(job: dict[str, Any], base: Path) -> None:
    whole = run(base, job)
    run(base, job, "output=apart", before=stop_at(2 * whole.prepared.job.train.batch))
    assert_same_state(run(base, job, "output=apart").last_state(), whole.last_state())


def test_averages_are_asked_for_by_name(job: dict[str, Any], base: Path) -> None:
    ran = run(base, job)
    state = ran.last_state().tensors
    opened = dict(open_run(str(ran.folder.path), base, at="average").model.named_parameters())
    for name in weights(ran, 4):
        assert torch.equal(opened[name].detach(), state[f"optimizer/{name}/average"])  # type: ignore[arg-type]


def test_a_run_without_averages_says_so(job: dict[str, Any], base: Path) -> None:
    ran = run(base, job, "train.average=null")
    with pytest.raises(UserError, match="kept no average of its weights"):
        open_run(str(ran.folder.path), base, at="average")
