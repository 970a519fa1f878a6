"""Reference of a fully trained model: a copy of its initial weights in host memory.

They are swapped with the trained weights for the reference's forward passes, and the device holds both only during
these. Each process copies its own shard, under every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stoker.checkpoint.run_weights import trainable
from stoker.models.head import OWN_CRITIC
from stoker.parallel.data_parallel.shard import reshard
from stoker.parallel.offload.page_locked import host_memory_like
from stoker.parallel.shard_spec import local_shard


class ReferenceWeights:
    """A copy of a model's current weights."""

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        self._model = model
        self._kept: dict[str, Tensor] = {}
        for name, parameter in _policy(model).items():
            own = local_shard(parameter.detach())
            self._kept[name] = host_memory_like(own, self).copy_(own)

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Swaps the copy into the model within the block, and restores its weights bitwise afterwards."""
        reshard(self._model)
        own = {name: local_shard(p.detach()) for name, p in _policy(self._model).items()}
        trained = {name: tensor.clone() for name, tensor in own.items()}
        try:
            for name, tensor in own.items():
                tensor.copy_(self._kept[name], non_blocking=True)
            yield
        finally:
            reshard(self._model)
            for name, tensor in own.items():
                tensor.copy_(trained[name])


def _policy(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters, without a separate critic's."""
    return {name: p for name, p in trainable(model).items() if not name.startswith(f"{OWN_CRITIC}.")}
