"""Collectives in compiled code have the gradients that they have in eager code."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.launch.process_pool import Pool
from stoker.parallel.collectives import copy_to, exchange, gather_parts, scatter_sum, sum_from

CALLS = {
    "copy_to": copy_to,
    "sum_from": sum_from,
    "gather_parts": lambda x, group: gather_parts(x, 1, group),
    "scatter_sum": lambda x, group: scatter_sum(x, 1, group),
    "exchange": lambda x, group: exchange(x, 0, 1, group),
}


def eager_and_compiled(name: str) -> tuple[Tensor, Tensor]:
    x = torch.arange(1.0, 9.0).view(2, 4).add(dist.get_rank()).requires_grad_()

    def result(x: Tensor) -> Tensor:
        return CALLS[name](x * 2, dist.group.WORLD) * 3

    torch.compiler.reset()
    compiled = torch.compile(result, backend="aot_eager", fullgraph=True)
    eager, again = (torch.autograd.grad(call(x).square().sum(), x)[0] for call in (result, compiled))
    return eager, again


@pytest.mark.parametrize("name", CALLS)
def test_compiled_collectives_have_the_gradients_of_eager_ones(pool: Pool, name: str) -> None:
    for eager, compiled in pool.run(eager_and_compiled, name, world=2):
        assert eager.abs().min() > 0
        torch.testing.assert_close(compiled, eager)
