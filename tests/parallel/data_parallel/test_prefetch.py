"""``parallel.prefetch``: how many blocks under zero3 gather their weights ahead."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from stoker.job.layout import Layout
from stoker.launch.process_pool import Pool
from stoker.parallel.data_parallel.shard import prefetch, shard
from stoker.parallel.mesh import Mesh

WIDTH, BLOCKS = 8, 5


def gathered_ahead(depth: int) -> tuple[list[int], list[int]]:
    """For each block, those after it (in the backward pass before it) that were gathered when it computed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    plain = copy.deepcopy(model)
    mesh = Mesh(Layout(data=dist.get_world_size(), shard="zero3", shard_size=2, prefetch=depth), torch.device("cpu"))
    shard(model, list(model), mesh, None)
    prefetch(list(model), mesh.layout.prefetch)
    gathered: list[int] = []
    ahead: dict[str, list[int]] = {"forward": [], "backward": []}
    unshard = FSDPParamGroup.unshard

    def recording(group: FSDPParamGroup, *arguments: Any, **options: Any) -> None:
        name = next((i for i, block in enumerate(model) if block is group.modules[0]), None)
        if name is not None and not group.is_unsharded:
            gathered.append(name)
        unshard(group, *arguments, **options)

    def note(way: str, place: int) -> None:
        ahead[way].append(len({g for g in gathered if (g > place if way == "forward" else g < place)}))

    for place, block in enumerate(model):
        block[0].register_forward_pre_hook(lambda *_, place=place: note("forward", place))
        block[0].register_full_backward_pre_hook(lambda *_, place=place: note("backward", place))
    x = torch.randn(4, WIDTH)
    FSDPParamGroup.unshard = recording  # type: ignore[method-assign]
    try:
        out = model(x)
        gathered.clear()
        out.sum().backward()
    finally:
        FSDPParamGroup.unshard = unshard  # type: ignore[method-assign]
    plain(x).sum().backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(own.grad, DTensor) and other.grad is not None
        torch.testing.assert_close(own.grad.full_tensor(), dist.get_world_size() * other.grad)
    return ahead["forward"], ahead["backward"]


@pytest.mark.pool
@pytest.mark.parametrize(("depth", "forward"), [(1, [0, 0, 0, 0, 0]), (2, [2, 2, 2, 1, 0]), (3, [3, 3, 2, 1, 0])])
def test_blocks_are_gathered_ahead(pool: Pool, depth: int, forward: list[int]) -> None:
    for forth, back in pool.run(gathered_ahead, depth, world=2):
        assert forth == forward
        assert back == [min(depth, place) for place in reversed(range(BLOCKS))]
