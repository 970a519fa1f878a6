"""Traffic sees every collective there is: one by one, then those that torch's own engines start."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from traffic import Traffic
from volume import Flow, Volume

from stoker.launch.process_pool import Pool
from stoker.parallel.collectives import copy_to, exchange, gather_parts, scatter_sum, sum_from

FOUR = 4 * 4  # bytes of the four floats that most calls below move


def ones(count: int = 4) -> Tensor:
    return torch.ones(count)


def point_to_point() -> None:
    other = 1 - dist.get_rank()
    both = [dist.P2POp(dist.isend, ones(), other), dist.P2POp(dist.irecv, ones(), other)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def rooted(start: Callable[..., object]) -> None:
    """A gather or scatter: only the root gives the list of all parts."""
    start(ones(), [ones(), ones()] if dist.get_rank() == 0 else None)


CALLS: dict[str, tuple[Callable[[], object], dict[str, Volume]]] = {
    "all_reduce": (lambda: dist.all_reduce(ones()), {"all-reduce": Volume(1, FOUR)}),
    "all_gather": (lambda: dist.all_gather([ones(2), ones(2)], ones(2)), {"all-gather": Volume(1, FOUR)}),
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(ones(), ones(2)),
        {"all-gather": Volume(1, FOUR)},
    ),
    "reduce_scatter_tensor": (
        lambda: dist.reduce_scatter_tensor(ones(2), ones()),
        {"reduce-scatter": Volume(1, FOUR)},
    ),
    "all_to_all_single": (lambda: dist.all_to_all_single(ones(), ones()), {"all-to-all": Volume(1, FOUR)}),
    "broadcast": (lambda: dist.broadcast(ones(), 0), {"broadcast": Volume(1, FOUR)}),
    "reduce": (lambda: dist.reduce(ones(), 0), {"reduce": Volume(1, FOUR)}),
    "gather": (lambda: rooted(dist.gather), {"gather": Volume(1, FOUR)}),
    "scatter": (lambda: rooted(dist.scatter), {"scatter": Volume(1, FOUR)}),
    "barrier": (dist.barrier, {"barrier": Volume(1, 0)}),
    "batch_isend_irecv": (point_to_point, {"send": Volume(1, FOUR), "receive": Volume(1, FOUR)}),
    "functional all_reduce": (
        lambda: functional.all_reduce(ones(), "sum", dist.group.WORLD) + 0,
        {"all-reduce": Volume(1, FOUR)},
    ),
    "functional all_gather": (
        lambda: functional.all_gather_tensor(ones(2), 0, dist.group.WORLD) + 0,
        {"all-gather": Volume(1, FOUR)},
    ),
    "functional reduce_scatter": (
        lambda: functional.reduce_scatter_tensor(ones(), "sum", 0, dist.group.WORLD) + 0,
        {"reduce-scatter": Volume(1, FOUR)},
    ),
    "functional all_to_all": (
        lambda: functional.all_to_all_single(ones(), None, None, dist.group.WORLD) + 0,
        {"all-to-all": Volume(1, FOUR)},
    ),
    "copy_to": (lambda: backward(copy_to), {"all-reduce": Volume(1, FOUR)}),
    "sum_from": (lambda: backward(sum_from), {"all-reduce": Volume(1, FOUR)}),
    "gather_parts": (
        lambda: backward(gather_parts, 0),
        {"all-gather": Volume(1, 2 * FOUR), "reduce-scatter": Volume(1, 2 * FOUR)},
    ),
    "scatter_sum": (
        lambda: backward(scatter_sum, 0),
        {"all-gather": Volume(1, FOUR), "reduce-scatter": Volume(1, FOUR)},
    ),
    "exchange": (lambda: backward(exchange, 0, 0), {"all-to-all": Volume(2, 2 * FOUR)}),
}


def backward(collective: Callable[..., Tensor], *options: object) -> None:
    collective(torch.ones(4, requires_grad=True), *options, dist.group.WORLD).sum().backward()


def counted_calls() -> dict[str, dict[Flow, Volume]]:
    found = {}
    for name, (call, _) in CALLS.items():
        with Traffic({"line": dist.group.WORLD}) as traffic:
            call()
        found[name] = traffic.volumes
    return found


def test_every_collective_is_counted_once_under_its_kind_and_axis(pool: Pool) -> None:
    expected = {name: {Flow("line", kind): v for kind, v in moved.items()} for name, (_, moved) in CALLS.items()}
    for rank in pool.run(counted_calls, world=2):
        assert rank == expected


def axes_of_four() -> list[Flow]:
    """Groups with the same processes are told apart by name; one that is not known goes by its processes."""
    first, same, third = (dist.new_group([0, 1]) for _ in range(3))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with Traffic({"first": first, "same": same, "absent": None}) as traffic:
        for group in (same, third, first, alone):
            dist.all_reduce(ones(), group=group)
    return [flow for flow, volume in traffic.volumes.items() for _ in range(volume.calls)]


def test_groups_are_told_apart(pool: Pool) -> None:
    flows = pool.run(axes_of_four, world=2)[1]
    assert [flow.axis for flow in flows] == ["same", "first", "first", "ranks 1"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8))


PARAMETERS = (4 * 6 + 6) + (6 * 8 + 8)
INNER, OUTER = 4 * (4 * 6 + 6), 4 * (6 * 8 + 8)  # bytes of the two layers


def counted_step(engine: str) -> dict[Flow, Volume]:
    """The third step: DDP rebuilds its buckets in the second."""
    module: nn.Module = model()
    if engine == "ddp":
        module = DistributedDataParallel(module)
    else:
        for layer in module:
            fully_shard(layer, reshard_after_forward=engine == "zero3")
    for _ in range(3):
        with Traffic({"batch": dist.group.WORLD}) as traffic:
            module(torch.ones(3, 4)).sum().backward()
    return traffic.volumes


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("ddp", {"all-reduce": Volume(1, 4 * PARAMETERS)}),
        ("zero2", {"all-gather": Volume(2, INNER + OUTER), "reduce-scatter": Volume(2, INNER + OUTER)}),
        ("zero3", {"all-gather": Volume(4, 2 * (INNER + OUTER)), "reduce-scatter": Volume(2, INNER + OUTER)}),
    ],
)
def test_what_torchs_engines_start_is_seen(pool: Pool, engine: str, expected: dict[str, Volume]) -> None:
    for rank in pool.run(counted_step, engine, world=2):
        assert rank == {Flow("batch", kind): volume for kind, volume in expected.items()}


def counted_pipeline() -> dict[Flow, Volume]:
    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, target: (y - target).square().sum())
    for _ in range(2):  # in the first step the stages tell each other their shapes
        with Traffic({"pipe": dist.group.WORLD}) as traffic:
            schedule.step(torch.ones(8, 4)) if rank == 0 else schedule.step(target=torch.ones(8, 4))
    return traffic.volumes


def test_a_pipelines_messages_are_seen(pool: Pool) -> None:
    boundary = Volume(4, 8 * 4 * 4)  # four micro-batches of two rows, four floats wide
    for rank in pool.run(counted_pipeline, world=2):
        assert rank == {Flow("pipe", "send"): boundary, Flow("pipe", "receive"): boundary}
