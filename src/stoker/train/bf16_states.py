"""Moments in bfloat16: ``train.optimizer_states: bf16``.

Stochastic rounding preserves their mean (Gupta et al., 2015). With rounding to nearest, a second moment that changes by
a thousandth per step would never change, as bfloat16 has eight bits of precision.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Bf16Moments:
    """bfloat16 format of moments; see `stoker.train.low_precision_adamw.HeldMoments`."""

    def zeros(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16)}

    def read(self, name: str, held: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        return held[name].to(dtype)

    def write(self, name: str, held: dict[str, Tensor], exact: Tensor, random: torch.Generator) -> None:
        held[name].copy_(stochastically_rounded(exact, random))


def stochastically_rounded(x: Tensor, random: torch.Generator) -> Tensor:
    """Rounds finite numbers to bfloat16, up or down at random, so that the mean is ``x``."""
    bits = x.float().view(torch.int32)
    noise = torch.randint(1 << 16, x.shape, generator=random, device=x.device, dtype=torch.int32)
    return (bits + noise).bitwise_and(-(1 << 16)).view(torch.float32).to(torch.bfloat16)
