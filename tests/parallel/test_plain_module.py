"""Scalar parameters under layouts that divide parameters into rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import UserError
from stoker.job.layout import Layout
from stoker.parallel.plain_module import check_scalars


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
