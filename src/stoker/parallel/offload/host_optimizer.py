"""Optimizer states in host memory, and the step on the host (ZeRO-Offload: Ren et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from stoker.grouping import grouped_from
from stoker.parallel.offload.copy_stream import Copies, copies_of
from stoker.parallel.offload.page_locked import host_memory_like
from stoker.parallel.shard_spec import local_shard

Groups = list[dict[str, Any]]
BUCKET_BYTES = 1 << 27  # of weights that are stepped at a time, while others are copied


class HostOptimizer(Optimizer):
    """An optimizer over copies of the parameters on the host, where its states are.

    A step copies weights and gradients to the host, steps there, and copies the weights back, bucket by bucket: while
    the host steps one, the next ones come and the last one goes back.

    Args:
        groups: of the parameters on the device.
        make: makes the optimizer on the host for the groups of the copies.
        copies: makes the copies from a device, and those to it; by default on streams of their own on a GPU.
    """

    def __init__(
        self,
        groups: Groups,
        make: Callable[[Groups], Optimizer],
        copies: Callable[[torch.device], Copies] = copies_of,
    ) -> None:
        super().__init__(groups, {})
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._copies = {p: Parameter(host_memory_like(p, self)) for p in parameters}
        self._gradients: dict[Tensor, Tensor] = {}
        device = parameters[0].device if parameters else torch.device("cpu")
        self._down, self._up = copies(device), copies(device)
        copied = [{**group, "params": [self._copies[p] for p in group["params"]]} for group in self.param_groups]
        self._inner = make(copied)
        self.defaults = self._inner.defaults
        self.state = _States(self._inner, self._copies)  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Performs one step. Parameters without a gradient do not change."""
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"], inner["weight_decay"] = outer["lr"], outer["weight_decay"]
        self._down.follow_device()
        self._up.follow_device()  # whose passes read the weights
        trained = (p for p in self._copies if p.grad is not None)
        buckets = list(grouped_from(trained, lambda p: local_shard(p).nbytes, BUCKET_BYTES))
        arrived = [self._down.begin(self._to_host(bucket)) for bucket in buckets]
        for bucket, wait in zip(buckets, arrived, strict=True):
            wait()
            for parameter in bucket:
                self._copies[parameter].grad = self._gradients[parameter]
            self._inner.step()
            for parameter in bucket:
                self._copies[parameter].grad = None
            self._up.begin([(local_shard(parameter), local_shard(self._copies[parameter])) for parameter in bucket])
        self._up.precede_device()

    def _to_host(self, bucket: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for parameter in bucket:
            if parameter not in self._gradients:
                self._gradients[parameter] = host_memory_like(parameter, self)
            assert parameter.grad is not None
            yield local_shard(self._copies[parameter]), local_shard(parameter)
            yield local_shard(self._gradients[parameter]), local_shard(parameter.grad)


class _States(MutableMapping[Tensor, dict[str, Any]]):
    """The states on the host by the parameter on the device; inserted states are moved to the host."""

    def __init__(self, inner: Optimizer, copies: dict[Tensor, Parameter]) -> None:
        self._inner, self._copies = inner, copies

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        copy = self._copies[parameter]
        if copy not in self._inner.state:
            raise KeyError(parameter)
        return self._inner.state[copy]

    def __setitem__(self, parameter: Tensor, state: dict[str, Any]) -> None:
        moved = {key: value.to("cpu") if isinstance(value, Tensor) else value for key, value in state.items()}
        self._inner.state[self._copies[parameter]] = moved

    def __delitem__(self, parameter: Tensor) -> None:
        del self._inner.state[self._copies[parameter]]

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for parameter, copy in self._copies.items() if copy in self._inner.state)

    def __len__(self) -> int:
        return len(self._inner.state)
