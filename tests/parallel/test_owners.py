"""Muon's matrices are divided over processes: its steps are those of one process, and the volume of messages."""

from __future__ import annotations

from math import prod
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode
from traffic import Traffic
from volume import Flow, Volume

from stoker.launch.process_pool import Pool
from stoker.train.optim.muon import Muon

SHAPES = [(6, 10), (10, 6), (8, 8), (5, 12), (4, 6, 6), (8, 8)]
DOUBLES = [8 * prod(shape) for shape in SHAPES]
SIZES = {"copies": (3,), "shards": (3,), "copies of shards": (2, 2)}


def tensor(whole: Tensor, kind: str) -> Tensor:
    """Returns a tensor as a process of a layout has it."""
    if kind in ("one", "copies"):
        return whole
    mesh = init_device_mesh("cpu", SIZES[kind])
    return distribute_tensor(whole, mesh, [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)])


def stepped(kind: str, at_once: int = 1 << 26) -> tuple[list[Tensor], dict[Flow, Volume], int]:
    """Returns the parameters after three steps, and messages and operations of the last one."""
    made = torch.Generator().manual_seed(0)

    def drawn() -> list[Tensor]:
        return [tensor(torch.randn(shape, generator=made, dtype=torch.float64), kind) for shape in SHAPES]

    parameters = [nn.Parameter(weights) for weights in drawn()]
    group = dist.group.WORLD if kind == "copies" else None
    optimizer = Muon([{"params": parameters, "weight_decay": 0.1}], 0.1, group)
    with patch("stoker.train.optim.muon.AT_ONCE", at_once), patch("stoker.train.optim.muon.EXPERTS_AT_ONCE", 2 * 6 * 6):
        for _ in range(3):
            for parameter, gradient in zip(parameters, drawn(), strict=True):
                parameter.grad = gradient
            with Traffic({"all": dist.group.WORLD}) as traffic, FlopCounterMode(display=False) as counter:
                optimizer.step()
    wholes = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    return [whole.detach() for whole in wholes], traffic.volumes, counter.get_total_flops()


@pytest.mark.parametrize("at_once", [1, 1 << 26])
@pytest.mark.parametrize("kind", SIZES)
def test_steps_are_those_of_one_process(pool: Pool, kind: str, at_once: int) -> None:
    """With fewer rows than processes, experts in parts, and a few matrices or all at a time."""
    ((expected, _, operations),) = pool.run(stepped, "one", world=1)
    found = pool.run(stepped, kind, at_once, world=prod(SIZES[kind]))
    for weights, _, own in found:
        assert all(torch.equal(one, other) for one, other in zip(weights, found[0][0], strict=True))
        assert own <= 0.7 * operations
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert sum(own for _, _, own in found) == operations


def test_results_are_gathered_and_rows_go_to_their_owner_and_back(pool: Pool) -> None:
    for _, sent, _ in pool.run(stepped, "copies", world=3):
        ((flow, volume),) = sent.items()
        assert flow == Flow("all", "all-gather") and volume.calls == 1
        assert sum(DOUBLES) <= volume.size <= 1.5 * sum(DOUBLES)  # each process' part is padded to the largest
    both = [sent[Flow("all", "all-to-all")] for _, sent, _ in pool.run(stepped, "shards", world=3)]
    assert [volume.calls for volume in both] == [2, 2, 2]
    assert sum(volume.size for volume in both) == 2 * (sum(DOUBLES) - DOUBLES[4])  # experts stay where they are
