"""The model as it was at the start, where all of it is trained: the first weights, kept in the host's memory.

They are exchanged with the trained ones for the reference's forward passes. So there is one model on the device, and
each process keeps what it holds of the weights, under every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stoker.checkpoint.run_weights import trainable
from stoker.models.head import OWN_CRITIC
from stoker.parallel.shard import reshard


class ReferenceWeights:
    """A copy of the weights that a model has now."""

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        self._model = model
        self._kept = {name: _own(p).to("cpu", copy=True) for name, p in _policy(model).items()}

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """The model has them within the block, and afterwards what it had before, to the bit."""
        reshard(self._model)
        own = {name: _own(p) for name, p in _policy(self._model).items()}
        trained = {name: tensor.clone() for name, tensor in own.items()}
        try:
            for name, tensor in own.items():
                tensor.copy_(self._kept[name])
            yield
        finally:
            reshard(self._model)
            for name, tensor in own.items():
                tensor.copy_(trained[name])


def _policy(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, without a critic of its own."""
    return {name: p for name, p in trainable(model).items() if not name.startswith(f"{OWN_CRITIC}.")}


def _own(parameter: nn.Parameter) -> Tensor:
    """What this process holds of a parameter."""
    data = parameter.detach()
    return data.to_local() if isinstance(data, DTensor) else data
