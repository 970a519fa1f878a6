"""Context parallelism: each process has a part of every row.

``gather``: a process computes its own queries against the keys and values of the whole row, which are gathered
(Llama 3: Grattafiori et al., 2024, section 3.3.2). The row is split into twice as many parts as there are processes;
each gets one from the front and one from the back, as later queries see more keys.
``ulysses``: heads are exchanged for tokens, so that a process attends with some heads over the whole row
(Jacobs et al., 2023).

A query sees the keys of its own segment only, on whichever process they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.models.attention.collate import Inputs, Segment
from stoker.models.attention.packed_row import AcrossRow
from stoker.models.attention.varlen_index import QuerySpan
from stoker.parallel.collectives import exchange, gather_parts, sum_from
from stoker.parallel.mesh import Mesh


@dataclass(frozen=True)
class _Group:
    """The processes that share a row."""

    group: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        return dist.get_rank(self.group) == 0

    def total(self, x: Tensor) -> Tensor:
        return sum_from(x, self.group)


@dataclass(frozen=True)
class GatherKeys(_Group):
    """The queries of this process, the keys and values of all.

    Attributes:
        ranges: the row's tokens on this process, [start, stop) of the front part and of the back part.
    """

    ranges: tuple[tuple[int, int], tuple[int, int]]

    def stretches(self, segments: Sequence[Segment]) -> list[QuerySpan]:
        found = []
        for start, stop in self.ranges:
            for number, s in enumerate(segments):
                first, end = max(start, s.start), min(stop, s.start + s.length)
                if first < end:
                    found.append(QuerySpan(number, first - s.start, end - first))
        return found

    def enter(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = (k_BGTK.shape[-1], v_BGTK.shape[-1])  # latent attention has values of another size than keys
        both = gather_parts(torch.cat((k_BGTK, v_BGTK), dim=-1), 2, self.group)
        parts = both.chunk(2 * dist.get_world_size(self.group), dim=2)
        # Process 0 has the first and the last part, process 1 the second and the second to last ...
        k, v = torch.cat((*parts[0::2], *reversed(parts[1::2])), dim=2).split(sizes, dim=-1)
        return q_BHTK, k, v

    def leave(self, out_BHTK: Tensor) -> Tensor:
        return out_BHTK

    def heads(self, count: int) -> slice:
        return slice(None)


@dataclass(frozen=True)
class ExchangeHeads(_Group):
    """Some heads over all tokens. The number of query heads must be divisible by that of processes."""

    def stretches(self, segments: Sequence[Segment]) -> list[QuerySpan]:
        return [QuerySpan(number, 0, s.length) for number, s in enumerate(segments)]

    def enter(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size, groups = dist.get_world_size(self.group), k_BGTK.shape[1]
        if groups % size:  # fewer key-value heads than processes: each gets a copy of the head it needs
            times = (size if size % groups == 0 else q_BHTK.shape[1]) // groups
            k_BGTK, v_BGTK = (x.repeat_interleave(times, dim=1) for x in (k_BGTK, v_BGTK))
        q, k, v = (exchange(x, 1, 2, self.group) for x in (q_BHTK, k_BGTK, v_BGTK))
        return q, k, v

    def leave(self, out_BHTK: Tensor) -> Tensor:
        return exchange(out_BHTK, 2, 1, self.group)

    def heads(self, count: int) -> slice:
        own = count // dist.get_world_size(self.group)
        return slice(dist.get_rank(self.group) * own, (dist.get_rank(self.group) + 1) * own)


def parts_of_row(mesh: Mesh) -> int:
    """Returns the number that the length of a row must be divisible by."""
    layout = mesh.layout
    halves = 2 if layout.context > 1 and layout.context_by == "gather" else 1
    return layout.context * halves * (layout.tensor if layout.sequence else 1)


def own_part(inputs: Inputs, mesh: Mesh) -> Inputs:
    """This process' tokens of a packed row, and their targets."""
    group = mesh.groups["context"]
    if group is None:
        return inputs
    length, size, index = inputs.ids.shape[1], mesh.layout.context, mesh.at("context")
    assert length % parts_of_row(mesh) == 0 and inputs.positions is not None
    across: AcrossRow
    if mesh.layout.context_by == "gather":
        step = length // (2 * size)
        ranges = ((index * step, (index + 1) * step), ((2 * size - 1 - index) * step, (2 * size - index) * step))
        across = GatherKeys(group, ranges)
    else:
        step = length // size
        ranges = ((index * step, (index + 1) * step), (length, length))
        across = ExchangeHeads(group)
    own = torch.cat([torch.arange(*r, device=inputs.ids.device) for r in ranges])
    place = torch.full((length,), -1, device=own.device)
    place[own] = torch.arange(len(own), device=own.device)
    predict = place[inputs.predict]
    kept = (predict >= 0).nonzero()[:, 0]  # the one number that the host waits for
    return replace(
        inputs,
        ids=inputs.ids[:, own],
        positions=inputs.positions[:, own],
        predict=predict[kept],
        span=None,
        targets=inputs.targets[kept],
        documents=inputs.documents[kept],
        own=own,
        across=across,
    )
