"""What a family's facts are: where its blocks are, which matrices are split in which direction, what is fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

Absent = Literal["absent", "zero", "identity"]
Axis = Literal["tensor", "pipeline", "context"]


@dataclass(frozen=True)
class Region:
    """A part of a block whose matrices the tensor processes split. All paths begin at the block.

    Its input is the same on every process (or, with sequence parallelism, gathered); each process computes
    with its own rows and columns; the outputs are summed once.

    Attributes:
        enter: module whose first argument (or ``hidden_states``) is the region's input.
        heads: whether it is attention: its layers are then split by whole heads, else by neurons.
        column: linear layers split by their outputs. Their outputs belong to heads or neurons of this process.
        keys_values: those among the column layers that make keys and values. Where there are fewer key-value
            heads than processes, a process computes the head that its queries need.
        row: linear layers split by their inputs; their outputs are summed over the processes.
        experts: module that holds ``num_experts`` experts as 3-D parameters, the first dimension counting them:
            each process holds some of the experts whole. The region's sum is then that of the output of ``enter``,
            and the row layers in it (of a shared expert) are not summed by themselves.
        shared: modules in the region that every process holds whole but uses for its own part only, so that
            their gradients are summed over the processes (norms of single heads, routers).
    """

    enter: str
    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    keys_values: tuple[str, ...] = ()
    experts: str | None = None
    shared: tuple[str, ...] = ()
    heads: bool = False


@dataclass(frozen=True)
class Fused:
    """A linear layer that holds several matrices one after the other, split into one layer each at build.

    Attributes:
        path: from the block.
        parts: names of the layers it becomes; their paths are ``path.part``.
        sizes: outputs of each part, from the model's configuration.
    """

    path: str
    parts: tuple[str, ...]
    sizes: Callable[[Any], tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """The layout facts of a family. Paths begin at the causal language model unless said otherwise.

    A path may be missing in a model (OPT's projections, the routers of a dense block): it then says nothing
    about it. What every parameter of a model needs is to be named by one of them: see `placement_problem`.

    Attributes:
        name: transformers' ``model_type``.
        blocks: the module list of blocks.
        embedding: the token embedding, split by vocabulary.
        first: modules that only the first pipeline stage has, and what stands for them on the others: nothing
            ("absent": never called there), a module giving zero, or one that hands its input on.
        last: modules after the blocks that only the last stage has (others hand their input on).
        regions: of a block. One whose row layers or experts a block lacks does not belong to it.
        whole: modules of a block (paths from it) that every process holds whole and applies to all of its tokens.
        positions: modules that give one vector per position of the row: with sequence parallelism a process
            keeps the part that belongs to its tokens.
        counts: attributes (paths from the block) that count heads or widths and are divided by the number of
            tensor processes: ``self_attn.num_heads``.
        per_head: attributes (paths from the block) that are tuples with one entry for each query head: a
            tensor process keeps those of its heads.
        groups: attributes (paths from the block) that say how many query heads share a key-value head.
        fused: layers that are split at build.
        transposed: linear layers (paths from the block) stored as (inputs, outputs), GPT-2's ``Conv1D``. They
            become ordinary ones at build.
        attend: makes the model's attention go through transformers' attention interface, for families that
            write it out themselves. None where it does already.
        refused: axes of a layout that the family's code does not allow, and why.
        bound: largest difference from one process in float64.
    """

    name: str
    blocks: str
    embedding: str
    first: Mapping[str, Absent]
    last: tuple[str, ...]
    regions: tuple[Region, ...]
    whole: tuple[str, ...]
    positions: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    fused: tuple[Fused, ...] = ()
    transposed: tuple[str, ...] = ()
    attend: Callable[[nn.Module], None] | None = None
    refused: Mapping[Axis, str] = field(default_factory=dict)
    bound: float = 1e-10


def find(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path, or None where a stage or a configuration has none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def regions_of(block: nn.Module, family: Family) -> tuple[Region, ...]:
    """The regions that a block has: dense blocks and those with experts may alternate in one model."""

    def has(region: Region) -> bool:
        needed = (region.enter, *region.row, *([region.experts] if region.experts else []))
        return all(find(block, path) is not None for path in needed)

    return tuple(region for region in family.regions if has(region))
