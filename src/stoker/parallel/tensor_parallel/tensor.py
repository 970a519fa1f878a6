"""Tensor parallelism: each matrix of a block is split over processes (Shoeybi et al., 2019).

A column layer computes this process' outputs (its heads, its neurons), the row layer after it takes them as
inputs, and the outputs of the row layers are summed: two sums a block in the forward pass, two in the backward.
With sequence parallelism (Korthikanti et al., 2022) activations between such regions are split along the
sequence: tokens are gathered at the start of a region, and its sum is scattered at the end.

A split parameter is an ordinary parameter with this process' part, which is recorded by name. The model's own code
runs unchanged on fewer heads and neurons.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from stoker.models.autocast import in_product_dtype
from stoker.models.families.facts import Family, Region, regions_of, submodule
from stoker.parallel.collectives import copy_to, gather_parts, scatter_sum, sum_from
from stoker.parallel.mesh import Mesh
from stoker.parallel.shard_spec import Piece, chunk, even_part
from stoker.parallel.tensor_parallel.head_split import HeadShare, group_of, share_heads
from stoker.parallel.tensor_parallel.tensor_rng import Apart

Share = Callable[[int], tuple[int, int]]
"""Maps the size of a dimension to this process' range of it."""


@dataclass
class Placed:
    """The parameters of a split model.

    Attributes:
        pieces: by name, of the parameters that are split over the tensor processes. All others are whole.
        partial: names of whole parameters whose gradients must be summed over the tensor processes.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)

    def split(self, name: str, module: nn.Module, key: str, dim: int, share: Share) -> None:
        """Replaces a parameter of a module, if there is one, by this process' share of a dimension."""
        whole = getattr(module, key)
        if whole is None:
            return
        piece = Piece(dim, *share(whole.shape[dim]), tuple(whole.shape))
        setattr(module, key, Parameter(piece.of(whole.detach()).clone(), requires_grad=whole.requires_grad))
        self.pieces[f"{name}.{key}"] = piece


def split_tensors(model: nn.Module, family: Family, mesh: Mesh) -> Placed:
    """Splits the blocks of a causal language model or a stage, on any device.

    The embedding and the head are split in `stoker.parallel.tensor_parallel.vocabulary_parallel`.
    """
    splitter = _Splitter(model, mesh)
    for number, block in model.get_submodule(family.blocks).named_children():
        path = f"{family.blocks}.{number}"
        group = group_of(block, family)
        for region in regions_of(block, family):
            splitter.region(path, block, region, group)
        heads = splitter.heads(Region.head_counts, group)
        splitter.counts(path, block, family, heads)
        for name in family.groups:
            _change(block, name, lambda _, heads=heads: heads.group)  # type: ignore[misc]  # the default is a HeadShare
    for positions in family.positions if mesh.layout.sequence else ():
        module = submodule(model, positions)
        if module is not None:
            module.register_forward_hook(lambda _m, _a, out: take_positions(out, mesh))
    return splitter.placed


def take_positions(out: Tensor, mesh: Mesh) -> Tensor:
    """This process' tokens of vectors for the whole row, shape (B, T, D) or (T, D); later pipeline stages have a 0-d
    tensor instead."""
    size = mesh.layout.tensor
    return out if out.dim() == 0 or not mesh.splits_sequence else out.chunk(size, dim=-2)[mesh.at("tensor")]


def enter(x: Tensor, mesh: Mesh) -> Tensor:
    """Returns the input of a region for all tokens, shape (..., T, D), on every tensor process."""
    group = mesh.groups["tensor"]
    return gather_parts(x, x.dim() - 2, group) if mesh.splits_sequence else copy_to(x, group)


class _Splitter:
    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.config: Any = model.config
        self.mesh = mesh
        self.index, self.size = mesh.at("tensor"), mesh.layout.tensor
        self.placed = Placed()
        self.apart = Apart(model, self.index, mesh.device)

    def heads(self, counts: tuple[str, str], group: int | None) -> HeadShare:
        """Returns this process' heads in a block whose query heads share key-value heads in groups of this size."""
        own = counts == Region.head_counts
        heads = share_heads(self.config, self.size, self.index, counts, group=group if own else None)
        assert heads is not None
        return heads

    def region(self, path: str, block: nn.Module, region: Region, group: int | None) -> None:
        heads = self.heads(region.head_counts, group)
        only_products = region.experts is None and bool(region.row)
        _hook_entry(block.get_submodule(region.enter), self.mesh, rounded=only_products)
        for name in region.column:
            layer, keys = submodule(block, name), name in region.keys_values
            if layer is None:  # latent attention may have its queries from one matrix or from two
                continue
            if keys and heads.repeated:
                self._repeat(f"{path}.{name}", layer, heads)
            else:
                self._column(f"{path}.{name}", layer, self._share(region, heads, keys=keys))
        at_end = region.sums_at_end or region.experts is not None
        for name in region.row:
            share = self._share(region, heads, keys=False)
            self._row(f"{path}.{name}", block.get_submodule(name), share, sums=not at_end)
        if region.experts is not None:
            self._experts(f"{path}.{region.experts}", block.get_submodule(region.experts))
        if at_end:
            block.get_submodule(region.enter).register_forward_hook(partial(_leave, self.mesh))
        for name in region.wide_norms:
            self._wide_norm(f"{path}.{name}", block.get_submodule(name), heads, keys=name in region.keys_values)
        self.counts(path, block, region, heads)
        for name in region.shared:
            module = submodule(block, name)
            for key, _ in module.named_parameters() if module is not None else ():
                self.placed.partial.add(f"{path}.{name}.{key}")
        if region.column and region.row:
            self.apart.around(block.get_submodule(region.column[-1]), block.get_submodule(region.row[-1]))

    def counts(self, path: str, block: nn.Module, of: Family | Region, heads: HeadShare) -> None:
        """Divides the numbers of heads in a block, and what has one entry for each."""
        for counted in of.counts:
            _change(block, counted, heads.own)
        for counted in of.key_counts:
            _change(block, counted, heads.of_keys)
        for entries in of.per_head:
            self._per_head(path, block, entries, heads)

    def _per_head(self, path: str, block: nn.Module, entries: str, heads: HeadShare) -> None:
        """Keeps the entries of this process' query heads, of a tuple or of a parameter (gpt-oss' sinks)."""
        holder, _, key = entries.rpartition(".")
        module = submodule(block, holder)
        if getattr(module, key, None) is None:  # MiMo's layers with full attention have no sinks
            return
        if isinstance(getattr(module, key), Parameter):
            assert module is not None
            self.placed.split(f"{path}.{holder}", module, key, 0, lambda _: heads.queries)
        else:
            _change(block, entries, lambda of_all: of_all[slice(*heads.queries)])

    def _share(self, region: Region, heads: HeadShare, *, keys: bool) -> Share:
        if not region.heads:
            return lambda size: chunk(size, self.size, self.index)
        return self._share_of_heads(heads, keys=keys)

    @staticmethod
    def _share_of_heads(heads: HeadShare, *, keys: bool) -> Share:
        count = heads.key_heads if keys else heads.query_heads
        start, stop = heads.keys if keys else heads.queries
        return lambda size: (start * (size // count), stop * (size // count))

    def _column(self, name: str, layer: nn.Module, share: Share) -> None:
        for inner, linear, side in _linears(layer):
            if side == "A":
                self.placed.partial.add(f"{name}{inner}.weight")
                continue
            self.placed.split(f"{name}{inner}", linear, "weight", 0, share)
            self.placed.split(f"{name}{inner}", linear, "bias", 0, share)
            linear.out_features = linear.weight.shape[0]
        _note_width(layer, "out_features")

    def _row(self, name: str, layer: nn.Module, share: Share, *, sums: bool) -> None:
        bias = None
        for inner, linear, side in _linears(layer):
            if side == "B":
                self.placed.partial.add(f"{name}{inner}.weight")
                continue
            self.placed.split(f"{name}{inner}", linear, "weight", 1, share)
            linear.in_features = linear.weight.shape[1]
            if linear.bias is not None and sums:
                bias = linear
                linear.forward = partial(_without_bias, linear)
        _note_width(layer, "in_features")
        if sums:
            layer.register_forward_hook(partial(_leave_row, self.mesh, bias))

    def _repeat(self, name: str, layer: nn.Module, of: HeadShare) -> None:
        """Splits a key or value layer whose heads several processes need: each replicates it and computes its head."""
        head, heads = of.keys[0], of.key_heads
        for inner, linear, side in _linears(layer):
            keys = ("weight", "bias") if linear.bias is not None else ("weight",)
            self.placed.partial.update(f"{name}{inner}.{key}" for key in keys)
            if side != "A":
                width = linear.weight.shape[0] // heads
                linear.forward = partial(_some_outputs, linear, slice(head * width, (head + 1) * width))

    def _wide_norm(self, name: str, norm: Any, heads: HeadShare, *, keys: bool) -> None:
        width, group = norm.weight.shape[0], self.mesh.groups["tensor"]
        if keys and heads.repeated:
            self.placed.partial.add(f"{name}.weight")
            head, size = heads.keys[0], width // heads.key_heads
            share = partial(_rms_norm_part, norm, group, width * self.size // heads.key_heads)
            norm.forward = partial(share, slice(head * size, (head + 1) * size))
        else:
            self.placed.split(name, norm, "weight", 0, self._share_of_heads(heads, keys=keys))
            norm.forward = partial(_rms_norm_part, norm, group, width, slice(None))

    def _experts(self, name: str, outermost: Any) -> None:
        experts, inside = outermost, name
        wrappers = []
        while hasattr(experts, "base_layer"):  # LoRA wraps the module once for each of its parameters
            wrappers.append(experts)
            self.placed.partial.update(
                f"{inside}.{key}" for key, _ in experts.named_parameters() if ".lora_" in f".{key}"
            )
            experts, inside = experts.base_layer, f"{inside}.base_layer"
        start, stop = even_part(experts.num_experts, self.size, self.index)
        for key, whole in list(experts.named_parameters(recurse=False)):
            if whole.shape[0] == experts.num_experts:
                self.placed.split(inside, experts, key, 0, lambda _: (start, stop))
        experts.num_experts = stop - start
        for wrapper in wrappers:
            wrapper.get_delta_factors = partial(_factors_of_own, wrapper, slice(start, stop))
        outermost.forward = partial(_of_own_experts, outermost.forward, start, stop)


def _linears(layer: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """(name below the layer, linear, side) of a layer and its LoRA; the side is "", "A" or "B"."""
    if not hasattr(layer, "base_layer"):
        yield "", layer, ""
        return
    yield ".base_layer", layer.base_layer, ""
    for side in ("A", "B"):
        for adapter, linear in getattr(layer, f"lora_{side}").items():
            yield f".lora_{side}.{adapter}", linear, side


def _note_width(layer: nn.Module, key: str) -> None:
    """Takes over a width of the layer below an adapter, once that one is split."""
    if hasattr(layer, "base_layer"):
        setattr(layer, key, getattr(layer.base_layer, key))


def _hook_entry(module: nn.Module, mesh: Mesh, *, rounded: bool) -> None:
    """Copies or gathers the input of a region.

    Args:
        rounded: whether it is sent in the dtype of products, which are all that read it; routers read it as it is.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name = None if args else "hidden_states"
        x = args[0] if name is None else kwargs[name]
        x = enter(in_product_dtype(x) if rounded else x, mesh)
        return ((x, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: x})

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _leave_row(mesh: Mesh, biased: Any, _: nn.Module, _args: Any, out: Tensor) -> Tensor:
    group = mesh.groups["tensor"]
    total = scatter_sum(out, out.dim() - 2, group) if mesh.splits_sequence else sum_from(out, group)
    return total if biased is None else total + biased.bias


def _leave(mesh: Mesh, module: nn.Module, args: Any, out: Any) -> Any:
    if isinstance(out, tuple):
        return (_leave_row(mesh, None, module, args, out[0]), *out[1:])
    return _leave_row(mesh, None, module, args, out)


def _without_bias(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight)


def _some_outputs(linear: nn.Linear, rows: slice, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight[rows], None if linear.bias is None else linear.bias[rows])


def _rms_norm_part(norm: Any, group: dist.ProcessGroup | None, summed: int, rows: slice, x: Tensor) -> Tensor:
    """Returns this process' part of an RMS norm over the heads of all tensor processes.

    Args:
        summed: number of elements that all processes sum the squares of; repeated heads count several times.
        rows: this process' rows of the weight.
        x: own heads, shape (..., width of the own heads).
    """
    x_own = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = copy_to(sum_from(x_own.square().sum(-1, keepdim=True), group), group)
    return (norm.weight[rows] * (x_own * torch.rsqrt(squares / summed + norm.variance_epsilon))).to(x.dtype)


def _of_own_experts(
    forward: Callable[..., Tensor], start: int, stop: int, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor
) -> Tensor:
    """Returns the part of the experts' output that is of this process' experts, shape (T, D).

    They are given their own tokens only, and save no rows of others. Each of the P pairs of a token and an expert is a
    row of its own, with the experts of this process numbered from 0.
    """
    own_TK = (expert_TK >= start) & (expert_TK < stop)
    pair_P = own_TK.flatten().nonzero()[:, 0]  # the host waits for their number
    if not len(pair_P):  # a pair of another process, with weight 0: kernels may not take products without rows
        pair_P = pair_P.new_zeros(1)
    local_TK = (expert_TK - start).clamp(0, stop - start - 1)
    local_P1, weight_P1 = (each.flatten()[pair_P, None] for each in (local_TK, weight_TK * own_TK))
    out_PD = forward(x_TD[pair_P // expert_TK.shape[1]], local_P1, weight_P1)
    out = out_PD.new_zeros(expert_TK.numel(), out_PD.shape[1])
    out[pair_P] = out_PD
    return out.view(*expert_TK.shape, -1).sum(dim=1)


def _factors_of_own(wrapper: Any, own: slice, adapter: str) -> tuple[Tensor, Tensor, float]:
    """Returns the LoRA factors of this process' experts; every process has all factors."""
    left, right, scaling = type(wrapper).get_delta_factors(wrapper, adapter)
    return left[own], right[own], scaling


def _change(block: nn.Module, path: str, change: Callable[[Any], Any]) -> None:
    """Replaces an attribute of a module within the block, if the module has it.

    After ``module.config``, it is replaced in a copy of the configuration for that module.
    """
    holder, _, key = path.rpartition(".")
    module: Any = submodule(block, holder.removesuffix(".config"))
    if module is not None and holder.endswith(".config"):
        module.config = copy.copy(module.config)
        module = module.config
    if module is not None and hasattr(module, key):
        setattr(module, key, change(getattr(module, key)))
