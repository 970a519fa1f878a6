"""Work on tensors that is divided over the processes of a group: each tensor has an owner, which does its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.parallel.collectives import all_gather
from stoker.parallel.shard_spec import chunk


def on_owners(
    work: Callable[[list[int]], list[Tensor]],
    like: Sequence[Tensor],
    owners: Sequence[int],
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype,
    at_once: int,
) -> Iterator[tuple[int, int, Tensor]]:
    """Computes each result on its owner, and yields all results on every process, in pieces: the index of a result, the
    number of its elements before the piece, and the piece, shape (elements,).

    Args:
        work: computes the results with these indices, in ``dtype``.
        like: for each result, a tensor of its shape.
        owners: for each result, a rank in ``group``.
        at_once: number of elements that are gathered at a time.
    """
    if group is None:
        yield from ((index, 0, result.reshape(-1)) for index, result in enumerate(work(list(range(len(like))))))
        return
    owned = _owned(owners, group)
    mine = owned[dist.get_rank(group)]
    flat = torch.cat([like[0].new_empty(0, dtype=dtype), *(x.reshape(-1) for x in (work(mine) if mine else []))])
    longest = max(sum(like[i].numel() for i in indices) for indices in owned)
    for start in range(0, longest, most := max(1, at_once // len(owned))):
        piece, length = flat[start : start + most], min(most, longest - start)
        gathered = all_gather(nn.functional.pad(piece, (0, length - len(piece))), 0, group).view(len(owned), length)
        for values, indices in zip(gathered, owned, strict=True):
            end = -start  # of a result, in `values`
            for index in indices:
                first, end = end, end + like[index].numel()
                part = values[max(first, 0) : max(end, 0)]
                if len(part):
                    yield index, max(-first, 0), part


def on_gathered_rows(
    work: Callable[[list[Tensor]], list[Tensor]],
    parts: Sequence[Tensor],
    rows: Sequence[int],
    owners: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Computes results of matrices with sharded rows: each is gathered on its owner, and its result is sharded again.

    Args:
        work: computes the results of whole matrices, in their shapes.
        parts: this process' rows of each matrix, divided as by `torch.chunk`; shape (..., part of the rows, columns).
        rows: number of rows of each whole matrix.
        owners: for each matrix, a rank in ``group``.
    """
    if group is None:
        return work(list(parts))
    owned, size = _owned(owners, group), dist.get_world_size(group)
    mine = owned[dist.get_rank(group)]
    heights = {i: [stop - start for start, stop in (chunk(rows[i], size, at) for at in range(size))] for i in mine}
    shapes = [[(*parts[i].shape[:-2], heights[i][at], parts[i].shape[-1]) for i in mine] for at in range(size)]
    shards = _exchanged([[parts[i] for i in indices] for indices in owned], shapes, like=parts[0], group=group)
    results = work([torch.cat(of_one, dim=-2) for of_one in zip(*shards, strict=True)])
    divided = [result.split(heights[i], dim=-2) for i, result in zip(mine, results, strict=True)]
    back = [[of_one[at] for of_one in divided] for at in range(size)]
    returned = _exchanged(back, [[parts[i].shape for i in indices] for indices in owned], like=parts[0], group=group)
    return _in_order(owned, returned)


def _owned(owners: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Returns the indices of the items of each process."""
    owned: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    for index, owner in enumerate(owners):
        owned[owner].append(index)
    return owned


def _in_order(owned: Sequence[Sequence[int]], found: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns the tensors of all processes in the order of their indices."""
    by_index = dict(zip(chain(*owned), chain(*found), strict=True))
    return [by_index[index] for index in range(len(by_index))]


def _exchanged(
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    *,
    like: Tensor,
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:
    """Sends tensors to each process, and returns those of given shapes from each, in one message."""
    sizes = [sum(prod(shape) for shape in some) for some in shapes]
    received = like.new_empty(sum(sizes))
    message = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for some in sent for tensor in some)])
    dist.all_to_all_single(received, message, sizes, [sum(t.numel() for t in some) for some in sent], group=group)
    return [_split(flat, some) for flat, some in zip(received.split(sizes), shapes, strict=True)]


def _split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
