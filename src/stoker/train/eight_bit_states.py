"""Moments in 8 bits, block by block: ``train.optimizer_states: 8bit`` (Dettmers et al., 2022, arXiv:2110.02861).

A block is 64 successive entries of a row. No layout that cuts rows from each other cuts a block, so that every layout
rounds alike, and a checkpoint of one is exact under another. (The blocks of bitsandbytes and torchao run over a
flattened shard: another number of processes would have others.)
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BLOCK = 64
LEVELS = 7  # powers of ten that a block spans
BYTES = 1 + 4 / BLOCK  # of an entry with its share of the block's scale
SCALE = "_scale"  # ends the name of a block's largest absolute value


class EightBitMoments:
    """See `stoker.train.low_precision_adamw.HeldMoments`.

    Vectors, and matrices whose rows are no multiples of a block, have moments in the parameter's type.
    """

    def zeros(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.dim() < 2 or local.shape[-1] % BLOCK or not local.is_contiguous():
            return {name: torch.zeros_like(parameter)}
        a_block = parameter.detach()[..., : local.shape[-1] // BLOCK]
        return {
            name: torch.zeros_like(parameter, dtype=torch.uint8),
            f"{name}{SCALE}": torch.zeros_like(a_block, dtype=torch.float32),
        }

    def read(self, name: str, held: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        if f"{name}{SCALE}" not in held:
            return held[name]
        return dequantised(held[name], held[f"{name}{SCALE}"], dtype, signed=_signed(name))

    def write(self, name: str, held: dict[str, Tensor], exact: Tensor, random: torch.Generator) -> None:
        if f"{name}{SCALE}" in held:
            codes, scale = quantised(exact, signed=_signed(name))
            held[name].copy_(codes)
            held[f"{name}{SCALE}"].copy_(scale)


def quantised(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales of the blocks): each entry's share of its block's largest, as the nearest value of `codebook`.

    An unsigned entry that is not zero does not become zero: a step divides by the root of a second moment.

    Args:
        x: shape (..., C), of finite numbers; C is a multiple of `BLOCK`.

    Returns:
        Shapes (..., C), uint8, and (..., C / BLOCK), in the type of ``x``.
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(dim=-1)
    shares = blocks / scale.clamp(min=torch.finfo(x.dtype).tiny)[..., None]
    values = _values(signed, x.device, x.dtype)
    codes = torch.bucketize(shares, (values[1:] + values[:-1]) / 2, out_int32=True, right=True)
    if not signed:
        codes = torch.maximum(codes, blocks > 0)
    return codes.to(torch.uint8).flatten(-2), scale


def dequantised(codes: Tensor, scale: Tensor, dtype: torch.dtype, *, signed: bool) -> Tensor:
    """The numbers that `quantised` gave codes of; shape (..., C)."""
    blocks = _values(signed, codes.device, dtype)[codes.int()].unflatten(-1, (-1, BLOCK))
    return (blocks * scale.to(dtype)[..., None]).flatten(-2)


@cache
def codebook(signed: bool) -> Tensor:
    """The 256 numbers of dynamic tree quantisation, ascending; float64 (section 1.3 and figure 2 of the paper).

    Zero, one, and for each power of ten 10^(e - 6), e = 0 .. 6, the middles of 2^e equal parts of [0.1, 1], with both
    signs; of twice as many parts where there is no sign.
    """
    found = [0.0, 1.0]
    for level in range(LEVELS):
        parts = 2**level if signed else 2 ** (level + 1)
        middles = [10.0 ** (level + 1 - LEVELS) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        found += middles + [-middle for middle in middles if signed]
    return torch.tensor(sorted(found), dtype=torch.float64)


@cache
def _values(signed: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    return codebook(signed).to(device, dtype)


def _signed(name: str) -> bool:
    return name == "exp_avg"
