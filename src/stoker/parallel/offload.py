"""Optimizer states in host memory, and the step on the host (ZeRO-Offload: Ren et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

Groups = list[dict[str, Any]]


class HostOptimizer(Optimizer):
    """An optimizer over copies of the parameters on the host, where its states are.

    A step copies weights and gradients to the host, steps there, and copies the weights back.

    Args:
        groups: of the parameters on the device.
        make: makes the optimizer on the host for the groups of the copies.
    """

    def __init__(self, groups: Groups, make: Callable[[Groups], Optimizer]) -> None:
        super().__init__(groups, {})
        self._copies = {p: Parameter(torch.empty_like(p, device="cpu")) for g in self.param_groups for p in g["params"]}
        copied = [{**group, "params": [self._copies[p] for p in group["params"]]} for group in self.param_groups]
        self._inner = make(copied)
        self.defaults = self._inner.defaults
        self.state = _States(self._inner, self._copies)  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step. Parameters without a gradient do not change."""
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"], inner["weight_decay"] = outer["lr"], outer["weight_decay"]
        for parameter, copy in self._copies.items():
            if parameter.grad is not None:
                copy.copy_(parameter)
                copy.grad = parameter.grad.to("cpu")
        self._inner.step()
        for parameter, copy in self._copies.items():
            if parameter.grad is not None:
                parameter.copy_(copy)
                copy.grad = None


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
