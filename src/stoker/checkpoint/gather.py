"""Assembly of whole tensors from the chunks of all processes."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.checkpoint.chunks import Held
from stoker.checkpoint.object_collectives import rank, run_on_all_ranks


def gather_whole(held: Held) -> dict[str, Tensor]:
    """Returns the whole tensors by name, on the CPU of rank 0; nothing on other ranks. A collective.

    Processes may hold different names, different chunks of a tensor, or copies of the same chunk.
    """
    mine = {name: chunks[0] for name, chunks in sorted(held.items())}
    boxes = run_on_all_ranks(
        lambda: {n: (c.shape, c.offsets, tuple(c.tensor.shape), c.tensor.dtype) for n, c in mine.items()}
    )
    whole: dict[str, Tensor] = {}
    for name in sorted(set().union(*boxes)):
        filled: dict[tuple[int, ...], int] = {}
        for owner, theirs in enumerate(boxes):
            if name not in theirs:
                continue
            shape, offsets, sizes, dtype = theirs[name]
            if rank() == 0:
                whole.setdefault(name, torch.empty(shape, dtype=dtype))
            if offsets in filled or 0 in sizes:
                continue
            filled[offsets] = math.prod(sizes)
            if owner == rank():
                part = mine[name].data().to("cpu").contiguous()
                if owner:
                    dist.send(part, 0)
            elif rank() == 0:
                part = torch.empty(sizes, dtype=dtype)
                dist.recv(part, owner)
            if rank() == 0:
                box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
                whole[name][box] = part
        assert sum(filled.values()) == math.prod(shape), f"{name}: no process holds some of it"
    return whole
