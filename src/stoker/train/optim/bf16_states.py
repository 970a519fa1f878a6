"""Moments in bfloat16: ``train.optimizer_states: bf16``.

Stochastic rounding preserves their mean (Gupta et al., 2015). With rounding to nearest, a second moment that changes by
a thousandth per step would never change, as bfloat16 has eight bits of precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stoker.train.optim.held_moments import MOMENTS, Codebooks, joined, store


class Bf16Moments:
    """bfloat16 format of moments; see `stoker.train.optim.held_moments.HeldMoments`."""

    rounds_at_random = True

    def zeros(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16)}

    def codebooks(self, device: torch.device, dtype: torch.dtype) -> Codebooks:
        return {}

    def read(self, name: str, held: Sequence[Mapping[str, Tensor]], dtype: torch.dtype, codebooks: Codebooks) -> Tensor:
        return joined([tensors[name].reshape(-1) for tensors in held]).to(dtype)

    def write(
        self,
        held: Sequence[Mapping[str, Tensor]],
        exact: Mapping[str, Tensor],
        noise: Sequence[Tensor] | None,
        bad: Tensor | None,
        codebooks: Codebooks,
    ) -> None:  # numbers of bfloat16 stay, so `bad` needs no care
        assert noise is not None
        for name, bits in zip(MOMENTS, noise, strict=True):
            store([tensors[name] for tensors in held], stochastically_rounded(exact[name], bits))


def stochastically_rounded(x: Tensor, noise: Tensor) -> Tensor:
    """Rounds finite numbers to bfloat16, up or down at random, so that the mean is ``x``; overwrites float32 ones.

    Args:
        noise: uniformly distributed integers below 2^16, int32.
    """
    if torch.compiler.is_compiling():  # which has no view of each number as two
        return ((x.float().view(torch.int32) + noise) >> 16).to(torch.int16).view(torch.bfloat16)
    bits = x.float().view(torch.int32).add_(noise)
    return bits.view(torch.bfloat16)[..., 1::2]  # the upper 16 bits of each number, on little-endian machines
