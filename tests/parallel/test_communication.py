"""The closed forms of sharding: against what torch's own FSDP2 and DDP move when driven by hand."""

from __future__ import annotations

import pytest
import torch
from communication import Held, ModelShape, StepShape, data_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from traffic import Traffic
from volume import Flow, Volume, Volumes

from stoker.job.layout import Layout
from stoker.launch.process_pool import Pool
from stoker.plan.time.network_cost import wire_bytes

MICRO_BATCHES = 3
STEP = StepShape(tokens=(2,) * MICRO_BATCHES, targets=(2,) * MICRO_BATCHES, chunks=(1,) * MICRO_BATCHES)


class Net(nn.Module):
    """Three blocks between two layers, of sizes that neither two nor four processes divide."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 7), nn.Linear(7, 11)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 7)) for _ in range(3))
        for block in self.blocks if frozen else ():
            block[0].requires_grad_(False)  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)

    def shape(self) -> ModelShape:
        blocks = tuple(held(block) for block in self.blocks)
        return ModelShape(blocks, ((*held(self.enter), *held(self.leave)),), width=7, query_width=7, key_value_width=7)


def held(module: nn.Module) -> tuple[Held, ...]:
    return tuple(Held(tuple(p.shape), p.requires_grad) for p in module.parameters())


def sharded(net: Net, layout: Layout) -> tuple[FSDPModule, Traffic]:
    mesh = init_device_mesh("cpu", (layout.replicas, layout.shard_size), mesh_dim_names=("replica", "shard"))
    over = mesh["replica", "shard"] if layout.replicas > 1 else mesh["shard"]
    for block in net.blocks:
        fully_shard(block, mesh=over, reshard_after_forward=layout.shard == "zero3")
    model = fully_shard(net, mesh=over)
    replica = mesh["replica"].get_group() if layout.replicas > 1 else None
    return model, Traffic({"shard": mesh["shard"].get_group(), "replica": replica})


def counted(layout: Layout, frozen: bool) -> tuple[Volumes, Volumes]:
    """(what one step moves, the closed form)."""
    net = Net(frozen=frozen)
    shape = net.shape()
    model, traffic = sharded(net, layout)
    with traffic:
        for number in range(MICRO_BATCHES):
            last = number == MICRO_BATCHES - 1
            model.set_reshard_after_backward(last or layout.shard == "zero3")
            model.set_requires_gradient_sync(last or layout.shard != "zero1")
            model.set_requires_all_reduce(last)
            net(torch.randn(2, 5)).sum().backward()
    return traffic.volumes, data_parallel(layout, shape, STEP)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shard_size", [2, 4])
@pytest.mark.parametrize("shard", ["zero1", "zero2", "zero3"])
def test_fully_shard_moves_what_the_closed_form_says(pool: Pool, shard: str, shard_size: int, frozen: bool) -> None:
    layout = Layout(data=4, shard=shard, shard_size=shard_size)  # type: ignore[arg-type]
    for moved, expected in pool.run(counted, layout, frozen, world=4):
        assert moved == expected


def counted_ddp() -> tuple[Volumes, Volumes]:
    net = Net(frozen=False)
    model = DistributedDataParallel(net)
    with Traffic({"batch": torch.distributed.group.WORLD}) as traffic:
        for number in range(MICRO_BATCHES):
            model.require_backward_grad_sync = number == MICRO_BATCHES - 1
            model(torch.randn(2, 5)).sum().backward()
    return traffic.volumes, data_parallel(Layout(data=2), net.shape(), STEP)


def test_ddp_moves_what_the_closed_form_says(pool: Pool) -> None:
    for moved, expected in pool.run(counted_ddp, world=2):
        assert moved == expected


def on_the_wire(layout: Layout, micro_batches: int, shape: ModelShape) -> float:
    """Bytes over this process' link, in units of the model's bytes, as the ZeRO paper counts."""
    step = StepShape((1,) * micro_batches, (1,) * micro_batches, (1,) * micro_batches)
    volumes = data_parallel(layout, shape, step)
    total = sum(wire_bytes(flow.kind, volume.size, layout.data) for flow, volume in volumes.items())
    return total / (4 * sum(p.elements for p in shape.parameters))


def test_zero_papers_figures() -> None:
    """Rajbhandari et al., 2020, section 7: DDP, ZeRO-1 and ZeRO-2 move 2 X, ZeRO-3 moves 3 X where blocks are all."""
    blocks = tuple((Held((1024, 16)),) for _ in range(8))
    shape = ModelShape(blocks, (), width=16, query_width=16, key_value_width=16)
    many = 1024  # processes, so that (n - 1) / n is nearly 1
    assert on_the_wire(Layout(data=many), 1, shape) == pytest.approx(2, rel=2e-3)
    for shard, expected in (("zero1", 2), ("zero2", 2), ("zero3", 3)):
        layout = Layout(data=many, shard=shard, shard_size=many)  # type: ignore[arg-type]
        assert on_the_wire(layout, 1, shape) == pytest.approx(expected, rel=2e-3)
    four = Layout(data=many, shard="zero3", shard_size=many)
    assert on_the_wire(four, 4, shape) == pytest.approx(12, rel=2e-3)


def test_hybrid_sums_its_parts_over_the_replicas_once() -> None:
    shape = ModelShape(((Held((8, 8)),),), (), width=8, query_width=8, key_value_width=8)
    moved = data_parallel(Layout(data=4, shard="zero2", shard_size=2), shape, StepShape((1, 1), (1, 1), (1, 1)))
    assert moved[Flow("replica", "all-reduce")] == Volume(1, 8 * 8 * 4 // 2)
