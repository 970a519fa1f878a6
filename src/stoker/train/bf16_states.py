"""AdamW whose moments are held in bfloat16: ``train.optimizer_states: bf16``.

Stochastic rounding keeps their mean (Gupta et al., 2015): by rounding to the nearest, a second moment that changes by a
thousandth a step would never change, as bfloat16 has eight bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from stoker.parallel.offload import Groups

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWWithBf16States(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) in float32 arithmetic with moments in bfloat16.

    The random numbers of a step depend on its number alone: a resumed run rounds alike, and so do copies of the model.
    """

    def __init__(self, groups: Groups, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "fused": True})
        self._random: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step. Parameters without a gradient do not change."""
        seeded: set[torch.device] = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
                random = self._generator(parameter.device)
                if parameter.device not in seeded:
                    random.manual_seed(int(state["step"]))
                    seeded.add(parameter.device)
                _step(_local(parameter), _local(parameter.grad), state, group, random)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._random:
            self._random[device] = torch.Generator(device)
        return self._random[device]


def _step(
    parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], random: torch.Generator
) -> None:
    held = [_local(state[name]) for name in MOMENTS]
    first, second = (moment.to(parameter.dtype) for moment in held)
    adamw(
        [parameter],
        [gradient],
        [first],
        [second],
        [],
        [state["step"]],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for moment, exact in zip(held, (first, second), strict=True):
        moment.copy_(stochastically_rounded(exact, random))


def stochastically_rounded(x: Tensor, random: torch.Generator) -> Tensor:
    """To bfloat16, up or down at random, so that the mean is ``x``; of finite numbers."""
    bits = x.float().view(torch.int32)
    noise = torch.randint(1 << 16, x.shape, generator=random, device=x.device, dtype=torch.int32)
    return (bits + noise).bitwise_and(-(1 << 16)).view(torch.float32).to(torch.bfloat16)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
