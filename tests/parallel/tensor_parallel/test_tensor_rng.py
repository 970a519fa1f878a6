"""Random numbers inside and outside of the regions that tensor parallelism splits."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stoker.parallel.tensor_parallel.tensor_rng import Apart


def region() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)).train()


def kept_states() -> int:
    """Random states of the processor in memory."""
    size = torch.get_rng_state().numel()
    found = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.uint8]
    return sum(x.numel() == size for x in found)


def test_processes_draw_apart_inside_a_region_and_alike_behind_it() -> None:
    inside, behind = [], []
    for index in range(2):
        model = region()
        Apart(model, index, torch.device("cpu")).around(model[0], model[2])
        model[1].register_forward_hook(lambda _, __, out: inside.append(out == 0))
        model(torch.ones(1, 8))
        behind.append(torch.rand(4))
    assert not torch.equal(inside[0], inside[1]) and torch.equal(behind[0], behind[1])


def test_recompute_leaves_no_state_behind() -> None:
    """It stops before the end of the last region, as no tensor is needed any more."""
    model = region()
    Apart(model, 1, torch.device("cpu")).around(model[0], model[2])
    counts = []
    for _ in range(4):
        checkpoint(model[:3], torch.ones(1, 8, requires_grad=True), use_reentrant=False).sum().backward()
        counts.append(kept_states())
    assert counts[-1] == counts[0]
