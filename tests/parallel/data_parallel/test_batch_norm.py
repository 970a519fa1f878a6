"""Batch norms over several processes against torch's own over all samples at once."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.launch.process_pool import Pool
from stoker.parallel.data_parallel.batch_norm import synchronise_batch_norms, without_batch_statistics
from stoker.parallel.recompute import recompute_blocks

SHARES = (5, 2, 3)  # samples of each process


def network(momentum: float | None) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, momentum=momentum)
    nn.init.uniform_(norm.weight), nn.init.uniform_(norm.bias)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.GELU(), nn.Flatten(), nn.BatchNorm1d(36)).double()


def passes(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Outputs of a second step, gradients of the inputs, and the buffers."""
    model(x * 2 + 1)
    x = x.clone().requires_grad_()
    out = model(x)
    (out * torch.arange(out.shape[1])).pow(2).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, {name: buffer.clone() for name, buffer in model.named_buffers()}


def on_a_rank(momentum: float | None, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model = network(momentum)
    assert synchronise_batch_norms(model, dist.group.WORLD) == 2
    return passes(model, x.split(SHARES)[dist.get_rank()])


def with_an_idle_rank(momentum: float | None, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model, idle = network(momentum), dist.get_rank() == 1
    synchronise_batch_norms(model, dist.group.WORLD)
    with without_batch_statistics() if idle else nullcontext():
        out, gradient, buffers = passes(model, torch.ones_like(x[:1]) if idle else x)
    return (out[:0], gradient[:0], buffers) if idle else (out, gradient, buffers)


def test_the_sample_of_an_idle_process_is_not_counted(pool: Pool) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    out, _, buffers = passes(network(0.1), x)
    ranks = pool.run(with_an_idle_rank, 0.1, x, world=2)
    torch.testing.assert_close(ranks[0][0], out, rtol=1e-10, atol=1e-10)
    for _, _, own in ranks:
        torch.testing.assert_close(own, buffers, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_many_processes_normalise_as_one(momentum: float | None, pool: Pool) -> None:
    torch.manual_seed(1)
    x = torch.randn(sum(SHARES), 2, 5, 5, dtype=torch.float64)
    out, gradient, buffers = passes(network(momentum), x)
    ranks = pool.run(on_a_rank, momentum, x, world=len(SHARES))
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks]), gradient, rtol=1e-9, atol=1e-9)
    for _, _, own in ranks:
        torch.testing.assert_close(own, buffers, rtol=1e-10, atol=1e-10)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def averages(x: Tensor, *, recomputed: bool, synchronised: bool) -> dict[str, Tensor]:
    model = Blocks()
    synchronise_batch_norms(model, dist.group.WORLD if synchronised else None)
    if recomputed:
        recompute_blocks(model)
    for _ in range(2):
        model(x).square().sum().backward()
    return dict(model.named_buffers())


def test_recompute_does_not_count_samples_again(pool: Pool) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    expected = averages(x, recomputed=False, synchronised=False)
    torch.testing.assert_close(averages(x, recomputed=True, synchronised=False), expected, rtol=0, atol=0)
    for rank in pool.run(partial(averages, recomputed=True, synchronised=True), x, world=2):
        torch.testing.assert_close(rank["blocks.0.1.num_batches_tracked"], torch.tensor(2))
        torch.testing.assert_close(rank["blocks.1.1.running_mean"], expected["blocks.1.1.running_mean"])


def test_alone_and_in_evaluation_nothing_changes() -> None:
    model = network(0.1)
    assert synchronise_batch_norms(model, None) == 0
    assert "forward" not in vars(model[1])
