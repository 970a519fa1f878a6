"""What tests count: FLOP and elements of adapters over the products of a shape, what autograd saves, and what is
allocated."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile

from stoker.plan.matmul import STACKED
from stoker.plan.shape import Shape
from stoker.plan.time.flop import attention_flop_per_token


def forward_flop_per_token(shape: Shape, *, seq_len: int, causal: bool) -> float:
    """FLOP of one forward pass with its logits, for one token: matrix products and attention, nothing else."""
    layers = sum(
        attention_flop_per_token(shape, shape.layer(i), seq_len=seq_len, causal=causal)
        + sum(matmul.forward_flop for matmul in shape.layer_matmuls(i))
        for i in range(shape.layers)
    )
    return layers + shape.head_matmul().forward_flop


def lora_parameters(shape: Shape, rank: int, *, targets: Collection[str] = ()) -> int:
    """Elements of low-rank adapters (Hu et al., 2021, section 4.1) of a rank on the products of these names in all
    layers; by default on all but the head, the router and the stacked experts."""
    return sum(
        matmul.copies * rank * sum(matmul.inputs + outputs for outputs in matmul.modules)
        for i in range(shape.layers)
        for matmul in shape.layer_matmuls(i)
        if (matmul.name in targets if targets else matmul.name not in STACKED)
    )


@contextmanager
def storages_saved(model: nn.Module) -> Iterator[dict[int, Any]]:
    """Collects the different storages that autograd saves within the block, without those of the model's tensors."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    storages: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # held, so that no other takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield storages


def peak_allocated(found: profile) -> int:
    """The most bytes that a profile of memory has above those at its start."""
    assert found.profiler is not None and found.profiler.kineto_results is not None
    every = found.profiler.kineto_results.events()
    events = sorted((e for e in every if e.name() == "[memory]"), key=lambda event: event.start_ns())
    now = most = 0
    for event in events:
        now += event.nbytes()
        most = max(most, now)
    return most
