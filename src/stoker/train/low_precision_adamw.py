"""AdamW with low-precision moments: ``train.optimizer_states``."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from stoker.parallel.local_shard import local_shard
from stoker.parallel.offload import Groups

MOMENTS = ("exp_avg", "exp_avg_sq")
AT_ONCE = 1 << 24  # elements of a parameter whose moments are converted to its type at a time


class HeldMoments(Protocol):
    """Storage format of the moments.

    A stored moment is one or more named tensors, which are split along the first dimension like the parameter.
    """

    def zeros(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Returns a stored moment of zeros.

        Args:
            parameter: possibly sharded; the tensors of the moment have its placement.
        """

    def read(self, name: str, held: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the moment of some rows in ``dtype``."""

    def write(self, name: str, held: dict[str, Tensor], exact: Tensor, random: torch.Generator) -> None:
        """Stores new values of these rows in ``held``."""


class LowPrecisionAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) that computes in the parameters' type and stores moments in another format.

    The random numbers of a parameter's step depend only on the step's number, so that a resumed run, all replicas, and
    the copies of a parameter on processes that train other parameters beside it round alike.
    """

    def __init__(
        self, groups: Groups, moments: HeldMoments, *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "fused": True})
        self._moments = moments
        self._random: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the parameters; those without a gradient do not change."""
        given = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        states = [self._state_of(parameter) for parameter, _ in given]
        steps = torch.stack([state["step"] for state in states]).tolist() if states else []  # waits for the device once
        for (parameter, group), state, step in zip(given, states, steps, strict=True):
            random = self._generator(parameter.device).manual_seed(int(step))
            self._step(local_shard(parameter), local_shard(parameter.grad), state, group, random)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in MOMENTS:
                state |= self._moments.zeros(name, parameter)
        return state

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._random:
            self._random[device] = torch.Generator(device)
        return self._random[device]

    def _step(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        random: torch.Generator,
    ) -> None:
        """Updates a parameter, some rows at a time."""
        tensors = {name: local_shard(state[name]) for name in state if name.startswith(MOMENTS)}
        rows = max(1, AT_ONCE * parameter.shape[0] // max(1, parameter.numel())) if parameter.dim() else 1
        cut = {name: torch.atleast_1d(tensor).split(rows) for name, tensor in tensors.items()}
        parts = zip(torch.atleast_1d(parameter).split(rows), torch.atleast_1d(gradient).split(rows), strict=True)
        for number, (part, of_gradient) in enumerate(parts):
            held = {name: pieces[number] for name, pieces in cut.items()}
            first, second = (self._moments.read(name, held, part.dtype) for name in MOMENTS)
            adamw(
                [part],
                [of_gradient],
                [first],
                [second],
                [],
                [state["step"].clone()],  # adamw increments it
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for name, exact in zip(MOMENTS, (first, second), strict=True):
                self._moments.write(name, held, exact, random)
        state["step"] += 1
