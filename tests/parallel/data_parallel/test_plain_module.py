"""Scalar parameters under layouts that divide parameters into rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import UserError
from stoker.job.layout import Layout
from stoker.job.load_job import load_job
from stoker.job.task_spec import TASKS
from stoker.parallel.data_parallel.plain_module import check_scalars, spread_module


class Scaled(nn.Module):
    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.0), requires_grad=trained)


@pytest.mark.parametrize("layout", [{"shard": "zero1"}, {"shard": "zero3"}, {"compress": "powersgd"}])
def test_a_scalar_is_named(layout: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="into rows, and scale is a scalar; make it a tensor of one entry") as caught:
        check_scalars(Scaled(), Layout(data=2, **layout))
    assert caught.value.problems[0].key == f"parallel.{next(iter(layout))}"
    check_scalars(nn.Linear(2, 2), Layout(data=2, **layout))


def test_scalars_are_replicated() -> None:
    check_scalars(Scaled(), Layout(data=2, compress="bf16"))
    check_scalars(Scaled(trained=False), Layout(data=2, compress="powersgd"))


def test_a_scalar_is_refused_at_the_key_of_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: Any, **__: Any) -> None:
        mesh: Any = SimpleNamespace(layout=Layout(data=2, shard="zero1"))
        spread_module(Scaled(), mesh, compiled=False, compute=None)

    monkeypatch.setattr("stoker.train.module.prepare_module.prepare_module", prepare)
    path = tmp_path / "job.yaml"
    path.write_text(
        "task: module\nsteps: 1\nmodule: {model: 'torch.nn:Flatten', loss: 'torch.nn:Flatten', data: 'builtins:list'}\n"
        "train: {batch: 8}\nparallel: {data: 2, shard: zero1}\n"
    )
    none: Any = None
    with pytest.raises(UserError, match=r"job\.yaml:5:.*scale is a scalar"):
        TASKS["module"].own_model.prepare(load_job(path), none, none, tmp_path)
