"""Check that processes with the same part of a tensor hold the same values."""

from __future__ import annotations

import math
from hashlib import blake2b

import torch
from torch import Tensor

from stoker.checkpoint.chunks import Chunk, Held
from stoker.checkpoint.object_collectives import run_on_all_ranks
from stoker.verify.difference import Difference, distance

Box = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, offsets, sizes


def difference_of_replicas(held: Held) -> Difference:
    """Returns the largest difference between two copies of a part of a tensor; a collective.

    Nothing re-synchronises copies that have diverged, so they must be bitwise equal.
    """
    mine = [(_box(name, chunk), chunk) for name, chunks in held.items() for chunk in chunks]
    digests: dict[Box, set[bytes]] = {}
    for of_rank in run_on_all_ranks(lambda: [(box, _digest(chunk.data())) for box, chunk in mine]):
        for box, digest in of_rank:
            digests.setdefault(box, set()).add(digest)
    odd = {box for box, values in digests.items() if len(values) > 1}
    if not odd:
        return Difference(0.0, "nothing")
    copies: dict[Box, list[tuple[int, Tensor]]] = {}
    odd_ones = run_on_all_ranks(lambda: [(box, chunk.data().cpu()) for box, chunk in mine if box in odd])
    for at, tensors in enumerate(odd_ones):
        for box, tensor in tensors:
            copies.setdefault(box, []).append((at, tensor))
    sizes = {
        f"{box[0]} on the processes {first[0]} and {at}": distance(tensor, first[1])
        for box, (first, *others) in copies.items()
        for at, tensor in others
    }
    where = max(sizes, key=lambda name: (math.isnan(sizes[name]), sizes[name]))
    return Difference(sizes[where], where)


def _box(name: str, chunk: Chunk) -> Box:
    return name, chunk.offsets, tuple(chunk.tensor.shape)


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
