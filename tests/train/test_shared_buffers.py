"""Buffers that processes change from their own samples: equal after each step, and unchanged ones to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.launch.process_pool import Pool
from stoker.train.module.shared_buffers import SharedBuffers, own_buffers, unchanged_buffers


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((2,), 0.1))
        self.register_buffer("least", torch.full((2,), torch.inf))
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("table", torch.full((3,), 1 / 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.norm = nn.BatchNorm1d(2)


def after_a_step() -> dict[str, Tensor]:
    model = Counting()
    shared = SharedBuffers(model, dist.group.WORLD)
    shared.begin()
    rank = dist.get_rank()
    with torch.no_grad():
        if rank < 2:  # the last process has no sample
            model.mean = model.get_buffer("mean") + (rank + 1) * 3.0
            model.get_buffer("least").fill_(rank)
        model.get_buffer("seen").add_(5 + dist.get_rank())
        model.get_buffer("scratch").add_(dist.get_rank())
    shared.unite()
    return dict(model.named_buffers())


@pytest.mark.pool
def test_changes_are_averaged(pool: Pool) -> None:
    ranks = pool.run(after_a_step, world=3)
    for rank, buffers in enumerate(ranks):
        torch.testing.assert_close(buffers["mean"], torch.full((2,), 4.6))
        torch.testing.assert_close(buffers["least"], torch.full((2,), 0.5))
        assert torch.equal(buffers["mask"], torch.full((2,), -torch.inf))
        assert torch.equal(buffers["mean"], ranks[0]["mean"])
        assert torch.equal(buffers["table"], torch.full((3,), 1 / 3))
        assert int(buffers["seen"]) == 5 and float(buffers["scratch"]) == rank


def test_batch_norms_have_statistics_of_their_own() -> None:
    model = Counting()
    assert own_buffers(model) == ["mean", "least", "mask", "table", "seen"]


def test_samples_that_do_not_count_change_nothing() -> None:
    model = Counting()
    with unchanged_buffers(model):
        model.mean = model.get_buffer("mean") + 1
        model.norm.running_mean.add_(1)
    torch.testing.assert_close(model.get_buffer("mean"), torch.full((2,), 0.1))
    torch.testing.assert_close(model.norm.running_mean, torch.ones(2))
