"""Gradients that are sent in fewer bytes: what arrives, and that a step which is not finite leaves nothing behind."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from traffic import Traffic

from stoker.job.layout import Compress, Layout
from stoker.launch.process_pool import Pool
from stoker.parallel.data_parallel.power_sgd import EXACT_STEPS
from stoker.parallel.data_parallel.replicate import replicate
from stoker.parallel.data_parallel.shard import shard
from stoker.parallel.mesh import Mesh

WIDTH = 64


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(16, WIDTH, generator=made)
    return x, x.flip(1) / 2


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad()
    (model(x) - y[:, : len(next(model.parameters()))]).square().mean().div(dist.get_world_size()).backward()
    found = next(model.parameters()).grad
    assert found is not None
    return found.clone()


def gradients(
    kind: Compress, steps: int, bad: int | None = None, *, out: int = WIDTH
) -> list[tuple[Tensor, list[Tensor], float]]:
    """Of each step: what the optimizer gets, the processes' own gradients, and the loss on all samples."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, out, bias=False)
    plain = nn.Linear(WIDTH, out, bias=False)
    layout = Layout(data=dist.get_world_size(), compress=kind, compress_rank=8)
    spread = replicate(model, Mesh(layout, torch.device("cpu")))
    found = []
    for step in range(steps):
        plain.load_state_dict(model.state_dict())
        everybody = [batch(rank, step) for rank in range(dist.get_world_size())]
        own = [gradient(plain, x, y) for x, y in everybody]
        with torch.no_grad():
            loss = sum(float((plain(x) - y[:, :out]).square().mean()) for x, y in everybody) / len(everybody)
        x, y = everybody[dist.get_rank()]
        if step == bad:  # not finite, so it is taken again
            assert spread.power_sgd is not None
            assert not gradient(spread, x * math.nan, y).isfinite().all()
            spread.power_sgd.undo()
        summed = gradient(spread, x, y)
        found.append((summed, own, loss))
        with torch.no_grad():
            model.weight.sub_(summed, alpha=out / 8)
    return found


@pytest.mark.pool
def test_bf16_rounds_what_is_sent(pool: Pool) -> None:
    first, second = pool.run(gradients, "bf16", 2, world=2)
    for (one, own, _), (other, _, _) in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, (own[0].bfloat16() + own[1].bfloat16()).float())
        assert not torch.equal(one, own[0] + own[1])


def sharded_gradients(kind: Compress, shard_size: int) -> tuple[Tensor, list[Tensor], int]:
    """The summed gradient under zero3, the processes' own gradients, and the bytes that were reduced."""
    torch.manual_seed(0)
    model, plain = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    plain.load_state_dict(model.state_dict())
    world = dist.get_world_size()
    mesh = Mesh(Layout(data=world, shard="zero3", shard_size=shard_size, compress=kind), torch.device("cpu"))
    shard(model, [], mesh, None)
    everybody = [gradient(plain, *batch(rank, 0)) for rank in range(world)]
    x, y = batch(dist.get_rank(), 0)
    with Traffic({}) as traffic:
        (model(x) - y).square().mean().div(world).backward()
    found = model.weight.grad
    assert isinstance(found, DTensor)
    sent = sum(volume.size for flow, volume in traffic.volumes.items() if flow.kind in ("reduce-scatter", "all-reduce"))
    return found.full_tensor(), everybody, sent


@pytest.mark.pool
@pytest.mark.parametrize("shard_size", [4, 2])
def test_shards_and_their_replicas_send_half_of_the_bytes(pool: Pool, shard_size: int) -> None:
    exact, compressed = (pool.run(sharded_gradients, kind, shard_size, world=4) for kind in ("none", "bf16"))
    for (one, own, sent), (other, _, halved) in zip(exact, compressed, strict=True):
        torch.testing.assert_close(one, sum(own[1:], own[0]))
        assert not torch.equal(other, one)
        torch.testing.assert_close(other, one, rtol=2**-6, atol=float(one.abs().max()) * 2**-7)
        assert halved * 2 == sent


@pytest.mark.pool
def test_powersgd_learns_from_narrow_matrices(pool: Pool) -> None:
    steps = EXACT_STEPS + 40
    first, second = pool.run(gradients, "powersgd", steps, world=2)
    for step, ((one, own, _), (other, _, _)) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(one, other)
        if step < EXACT_STEPS:
            torch.testing.assert_close(one, own[0] + own[1])
        else:
            assert torch.linalg.matrix_rank(one) <= 8
    assert first[-1][2] < 1e-3 * first[0][2]


def narrow_gradients(steps: int, bad: int | None) -> list[tuple[Tensor, list[Tensor], float]]:
    """Of a matrix that PowerSGD sends whole, as products would not be smaller."""
    return gradients("powersgd", steps, bad, out=8)


@pytest.mark.pool
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("bad", [EXACT_STEPS - 1, EXACT_STEPS, EXACT_STEPS + 3])
def test_powersgd_forgets_a_step_that_was_not_finite(pool: Pool, narrow: bool, bad: int) -> None:
    run = (narrow_gradients,) if narrow else (gradients, "powersgd")
    steps = EXACT_STEPS + 8
    undisturbed = pool.run(*run, steps, None, world=2)[0]  # type: ignore[arg-type]
    found = pool.run(*run, steps, bad, world=2)[0]  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for (a, _, _), (b, _, _) in zip(found, undisturbed, strict=True))
