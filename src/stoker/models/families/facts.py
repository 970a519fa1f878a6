"""The layout facts of a model family: the path of its blocks, the split of its matrices, its fused layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

Absent = Literal["absent", "zero", "identity"]
Axis = Literal["tensor", "pipeline", "context"]


@dataclass(frozen=True)
class Region:
    """A part of a block whose matrices the tensor processes split. All paths start at the block.

    Its input is the same on every process (or, with sequence parallelism, gathered); each process computes
    with its own rows and columns; the outputs are summed once.

    Attributes:
        enter: module whose first argument (or ``hidden_states``) is the region's input.
        heads: whether it is attention, whose layers are split by whole heads, else by neurons.
        column: linear layers split by their outputs.
        keys_values: the column layers of keys and values. With fewer key-value heads than processes, a
            process computes the head that its queries need.
        row: linear layers split by their inputs; their outputs are summed over the processes.
        sums_at_end: whether the output of ``enter`` is summed, and not those of the row layers, which see other rows.
        experts: module with ``num_experts`` experts as 3-D parameters, indexed by the first dimension; each process
            has some experts whole. The output of ``enter`` is then summed instead of those of the row layers.
        shared: modules that every process replicates but uses for its own part only, so that their gradients are
            summed over the processes (norms of single heads, routers).
        head_counts: keys of the configuration with the numbers of heads and of key-value heads. Each of the latter
            serves a group of the former.
        counts, key_counts, per_head: as those of `Family`, by the heads of this region.
        wide_norms: RMS norms over the concatenated heads of queries or (if also under ``keys_values``) of keys. Their
            weights are split by heads, and the mean square is computed over all processes.
    """

    enter: str
    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    keys_values: tuple[str, ...] = ()
    sums_at_end: bool = False
    experts: str | None = None
    shared: tuple[str, ...] = ()
    wide_norms: tuple[str, ...] = ()
    heads: bool = False
    head_counts: tuple[str, str] = ("num_attention_heads", "num_key_value_heads")
    counts: tuple[str, ...] = ()
    key_counts: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fused:
    """A linear or convolution layer that concatenates several matrices; each becomes a layer when the model is built.

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
    """The layout facts of a family. Paths start at the causal language model unless stated otherwise.

    A path may be missing in a model (OPT's projections, the routers of a dense block). Every parameter has to
    be named by one of them: see `placement_problem`.

    Attributes:
        name: transformers' ``model_type``.
        blocks: the module list of blocks.
        embedding: the token embedding, split by vocabulary.
        first: modules of the first pipeline stage only, and their replacement on the others: none ("absent": never
            called there), a module that returns zero, or the identity.
        last: modules after the blocks, of the last stage only (the identity on others).
        input_factors: attributes (paths from the model) with a factor of the embeddings, which the model's code
            multiplies with what enters the first block. It is 1 on later pipeline stages, and after ``config`` false.
        regions: of a block. A block without a region's row layers or experts does not have it.
        whole: modules and parameters of a block (paths from it) that every process replicates and applies to all of
            its tokens.
        positions: modules that return one vector per position of the row: with sequence parallelism a process
            keeps those of its tokens.
        counts: attributes (paths from the block) with numbers of heads or widths, which are divided by the number of
            tensor processes: ``self_attn.num_heads``. If the path contains ``config``, the module gets its own
            copy of the configuration.
        key_counts: attributes (paths from the block) with the number of key-value heads, or a multiple of it.
        per_head: attributes (paths from the block) with one entry for each query head, tuples or parameters: a
            tensor process keeps those of its heads.
        groups: attributes (paths from the block) with the number of query heads that share a key-value head, which
            may differ from block to block.
        fused: layers that are split when the model is built.
        transposed: linear layers (paths from the block) stored as (inputs, outputs), GPT-2's ``Conv1D``, which become
            ordinary ones.
        attend: routes attention through transformers' attention interface, in families whose code computes it itself.
        by_document: types of layers (``config.layer_types``) for which ``attend`` computes documents apart.
        from_ids: returns further inputs of the body that its code computes from token ids; with sequence parallelism
            it gets embeddings instead of ids.
        refused: axes of a layout that the family's code does not allow, and why.
        refused_with: the same for models whose configuration has a key that is neither 0 nor false, or for
            ``key=entry`` a list with this entry.
        untrained: modules of a block (paths from it) whose parameters get no gradient, and are frozen.
        bound: largest allowed difference from one process in float64.
    """

    name: str
    blocks: str
    embedding: str
    first: Mapping[str, Absent]
    last: tuple[str, ...]
    regions: tuple[Region, ...]
    whole: tuple[str, ...]
    input_factors: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    key_counts: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    fused: tuple[Fused, ...] = ()
    transposed: tuple[str, ...] = ()
    attend: Callable[[nn.Module], None] | None = None
    by_document: tuple[str, ...] = ()
    from_ids: Callable[[nn.Module, Tensor], dict[str, Tensor]] | None = None
    untrained: tuple[str, ...] = ()
    refused: Mapping[Axis, str] = field(default_factory=dict)
    refused_with: Mapping[tuple[Axis, str], str] = field(default_factory=dict)
    bound: float = 1e-10


def submodule(model: nn.Module, path: str) -> nn.Module | None:
    """Returns the module at a path, or None."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def regions_of(block: nn.Module, family: Family) -> tuple[Region, ...]:
    """Returns the regions that a block has: dense blocks and those with experts may alternate in one model."""

    def has(region: Region) -> bool:
        needed = (region.enter, *region.row, *([region.experts] if region.experts else []))
        return all(submodule(block, path) is not None for path in needed)

    return tuple(region for region in family.regions if has(region))


def untrained_modules(model: nn.Module, family: Family) -> list[nn.Module]:
    """Returns the modules of a causal language model whose parameters get no gradient."""
    blocks = model.get_submodule(family.blocks).children() if family.untrained else ()
    found = [submodule(block, path) for block in blocks for path in family.untrained]
    return [module for module in found if module is not None]
