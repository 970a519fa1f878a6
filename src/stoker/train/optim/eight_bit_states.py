"""Block-wise 8-bit moments: ``train.optimizer_states: 8bit`` (Dettmers et al., 2022, arXiv:2110.02861).

A block is 64 consecutive entries of a row. Sharding by rows never splits a block, so that all such layouts round alike,
and a checkpoint of one is exact under another. (Blocks of bitsandbytes and torchao run over a flattened shard, so that
they depend on the number of processes.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from stoker.parallel.shard_spec import local_shard
from stoker.train.optim.held_moments import MOMENTS, Codebook, Codebooks, joined, store

BLOCK = 64
LEVELS = 7  # powers of ten in a block's range
BYTES = 1 + 4 / BLOCK  # per entry, with its share of the block's scale
SCALE = "_scale"  # name suffix of the largest absolute value of each block


class EightBitMoments:
    """Block-wise 8-bit format of moments; see `stoker.train.optim.held_moments.HeldMoments`.

    Moments of vectors, and of matrices whose row length is not a multiple of `BLOCK`, are in the parameter's type.
    """

    rounds_at_random = False

    def zeros(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        local = local_shard(parameter)
        if local.dim() < 2 or local.shape[-1] % BLOCK or not local.is_contiguous():
            return {name: torch.zeros_like(parameter)}
        a_block = parameter.detach()[..., : local.shape[-1] // BLOCK]
        return {
            name: torch.zeros_like(parameter, dtype=torch.uint8),
            f"{name}{SCALE}": torch.zeros_like(a_block, dtype=torch.float32),
        }

    def codebooks(self, device: torch.device, dtype: torch.dtype) -> Codebooks:
        return {name: codebook_for(name == "exp_avg", device, dtype) for name in MOMENTS}

    def read(self, name: str, held: Sequence[Mapping[str, Tensor]], dtype: torch.dtype, codebooks: Codebooks) -> Tensor:
        codes, scale = (
            joined([tensors[key].reshape(-1) for tensors in held]) if key in held[0] else None
            for key in (name, f"{name}{SCALE}")
        )
        assert codes is not None
        return codes if scale is None else dequantised(codes, scale, codebooks[name])

    def write(
        self,
        held: Sequence[Mapping[str, Tensor]],
        exact: Mapping[str, Tensor],
        noise: Sequence[Tensor] | None,
        bad: Tensor | None,
        codebooks: Codebooks,
    ) -> None:
        for name, moment in exact.items():
            found = {name: moment}
            if f"{name}{SCALE}" in held[0]:
                codes, scale = quantised(moment, codebooks[name])
                found = {name: codes, f"{name}{SCALE}": scale}
            for key, new in found.items():
                places = [tensors[key] for tensors in held]
                # Moments that are quantised again would differ.
                kept = (
                    new
                    if bad is None
                    else torch.where(bad > 0, joined([p.reshape(-1) for p in places]).view_as(new), new)
                )
                store(places, kept)


def quantised(x: Tensor, book: Codebook) -> tuple[Tensor, Tensor]:
    """Quantises numbers: divides each block by its largest absolute value and takes the nearest values of a codebook.

    A nonzero unsigned entry does not become zero, since a step divides by the square root of the second moment.

    Args:
        x: shape (..., C), of finite numbers; C is a multiple of `BLOCK`.

    Returns:
        (codes, scales): shape (..., C), uint8, and shape (..., C / BLOCK), in the type of ``x``.
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = torch.linalg.vector_norm(blocks, math.inf, dim=-1)
    shares = blocks / scale.clamp(min=torch.finfo(x.dtype).tiny)[..., None]
    codes = torch.bucketize(shares, book.middles, out_int32=True, right=True)
    if not book.signed:
        codes = torch.maximum(codes, blocks > 0)
    return codes.to(torch.uint8).flatten(-2), scale


def dequantised(codes: Tensor, scale: Tensor, book: Codebook) -> Tensor:
    """Reverses `quantised`, up to rounding; returns shape (..., C), in the type of the codebook."""
    blocks = book.values[codes.int()].unflatten(-1, (-1, BLOCK))
    return blocks.mul_(scale.to(blocks.dtype)[..., None]).flatten(-2)


@cache
def codebook(signed: bool) -> Tensor:
    """Returns the 256 values of dynamic tree quantisation, ascending; float64 (section 1.3 and figure 2 of the paper).

    These are zero, one, and for each power of ten 10^(e - 6), e = 0 .. 6, the midpoints of 2^e equal parts of [0.1, 1]
    with both signs; unsigned, the midpoints of twice as many parts.
    """
    found = [0.0, 1.0]
    for level in range(LEVELS):
        parts = 2**level if signed else 2 ** (level + 1)
        middles = [10.0 ** (level + 1 - LEVELS) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        found += middles + [-middle for middle in middles if signed]
    return torch.tensor(sorted(found), dtype=torch.float64)


@cache
def codebook_for(signed: bool, device: torch.device, dtype: torch.dtype) -> Codebook:
    """Returns `codebook` on a device; the middles are computed in ``dtype``."""
    values = codebook(signed).to(device, dtype)
    return Codebook(values, (values[1:] + values[:-1]) / 2, signed)
