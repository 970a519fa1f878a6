"""Applies the parallelisms to a meta model, in a fixed order:

pipeline stages -> tensor parallelism -> float8 -> compile -> recompute -> offload of activations -> sharding ->
weights -> replication.

`stoker.models.build_model` has split fused layers and inserted adapters before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.job.layout import Layout, blocks_of_stages
from stoker.models import grouped_experts
from stoker.models.attention import packed_attention
from stoker.models.attention.even_rows import keep_cudnn_for_even_rows
from stoker.models.blocks import blocks_of
from stoker.models.build_model import Built
from stoker.models.causal_loss import CausalLoss
from stoker.models.critic import attach_critic
from stoker.models.dropout import has_dropout
from stoker.models.families import family_of
from stoker.models.head import OWN_CRITIC, VALUE_HEAD, head_of
from stoker.models.language_model import LanguageModel, OwnCritic
from stoker.models.objective import Objective
from stoker.models.router_balance import RouterBalance
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.quantise import can_be_cut, packed_parameters
from stoker.models.tuning.virtual_tokens import has_prefix, virtual_ids
from stoker.models.weight_source import Rows, WeightSource
from stoker.parallel.apply_to_blocks import apply_to_blocks
from stoker.parallel.data_parallel.replicate import replicate
from stoker.parallel.data_parallel.shard import prefetch, shard
from stoker.parallel.float8 import Float8
from stoker.parallel.gradients import Gradients, Trained
from stoker.parallel.materialise import materialise
from stoker.parallel.mesh import Mesh
from stoker.parallel.model_stage import ModelStage
from stoker.parallel.parallel_model import ParallelModel
from stoker.parallel.pipeline import Pipeline
from stoker.parallel.pipeline_split import keep_stage_modules
from stoker.parallel.shard_spec import NamedShards, Piece
from stoker.parallel.tensor_parallel.async_tensor import enable_async_tensor
from stoker.parallel.tensor_parallel.tensor import Placed, split_tensors
from stoker.parallel.tensor_parallel.vocabulary_parallel import split_vocabulary

Apply = Callable[..., "_Applied"]


def parallelize(
    built: Built,
    mesh: Mesh,
    objective: Objective,
    *,
    balance: RouterBalance | None,
    compiled: bool,
    float8: Float8,
    compute: torch.dtype | None,
    apart: bool,
    critic: Built | None,
) -> ParallelModel:
    """Parallelizes a language model over the processes of a mesh; a collective.

    Args:
        objective: the loss of the forward pass.
        balance: the auxiliary loss of the routers, in one process.
        compiled: whether blocks are compiled.
        float8: recipe of the products of the blocks.
        compute: dtype of matrix products under autocast, if any.
        apart: whether the passes of a step have different parameters, as those of a policy and its critic.
        critic: a separate critic model; it becomes a part of the model.
    """
    grouped_experts.register()
    keep_cudnn_for_even_rows()
    model, layout = built.model, mesh.layout
    balance = replace(balance, copies=layout.tensor) if balance is not None else None
    for each in (built, critic):
        if each is not None and _packs(each.model):
            packed_attention.register()
            unwrap(each.model).set_attn_implementation(packed_attention.NAME)
    apply = partial(_apply, mesh=mesh, balance=balance, compiled=compiled, float8=float8)
    if layout.pipeline > 1:
        return _parallelize_pipeline(built, mesh, objective, apply, compute)
    weights: WeightSource = built.weights
    applied = apply(model)
    language, blocks = applied.language, blocks_of(unwrap(model))
    if critic is not None:
        own = apply(critic.model, balance=None).under(OWN_CRITIC)
        language = replace(language, critic=OwnCritic(own.language))
        applied = replace(applied, pieces=applied.pieces | own.pieces, partial=applied.partial | own.partial)
    root = CausalLoss(language, objective)
    if root.critic is not None:
        blocks = [*blocks, *blocks_of(root.critic.model), root.critic]
    packed_weights = packed_parameters(model)
    if layout.shard != "none":
        whole = {p for p in packed_weights if layout.zero < 3 or not can_be_cut(p)}
        shard(root, blocks, mesh, _gathered_in(layout, compute), whole=whole)
        for each in (built, critic):
            if each is not None:
                prefetch(blocks_of(unwrap(each.model)), layout.prefetch)
    if critic is not None:  # now that its parameters belong to its own groups
        weights = attach_critic(model, weights, critic.model, critic.weights)
    materialise(model, weights, applied.pieces, mesh.device, offload=layout.offload == "params")
    if not packed_weights:
        root._apply(_same)  # makes fully_shard take the new memory of its parameters
    trained = [
        Trained(p, split=name in applied.pieces, partial=name in applied.partial)
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    copies = layout.shard == "none" and mesh.groups["batch"] is not None
    return ParallelModel(
        model=model,
        language=language,
        root=replicate(root, mesh) if copies and not apart else root,
        pipeline=None,
        shards=NamedShards(applied.pieces),
        gradients=Gradients(trained, mesh, reduce_batch=copies and apart),
    )


def _parallelize_pipeline(
    built: Built,
    mesh: Mesh,
    objective: Objective,
    apply: Apply,
    compute: torch.dtype | None,
) -> ParallelModel:
    """Splits a model into the stages of this process, and parallelizes each.

    If the embedding and the head are tied, the last stage has a copy of the embedding as its head.
    """
    layout, prefix = mesh.layout, _prefix(built.model)
    whole = unwrap(built.model)
    family = family_of(whole.config)
    assert family is not None
    embedding, output = f"{family.embedding}.weight", whole.get_output_embeddings()
    tied = output is not None and output.weight is whole.get_submodule(family.embedding).weight
    head_name = next(name for name, module in whole.named_modules() if module is output)
    blocks = len(list(whole.get_submodule(family.blocks).children()))
    ranges = blocks_of_stages(blocks, layout.stage_count, layout.stages)
    assert len(ranges) == layout.stage_count and sum(map(len, ranges)) == blocks
    gathered = _gathered_in(layout, compute)
    embedded = gathered if layout.shard != "none" and gathered is not None else _held_in(whole)
    dtype = compute if compute == torch.bfloat16 else embedded
    pieces: dict[str, Piece] = {}
    aliases: dict[str, str] = {}
    summed: set[str] = set()
    stages: list[ModelStage] = []
    holder = nn.ModuleList()
    for position, number in enumerate(layout.stages_of(mesh.at("pipe"))):
        first, last = number == 0, number == layout.stage_count - 1
        part = copy.deepcopy(built.model)
        inner: Any = unwrap(part)
        if last and tied and not first:
            head = inner.get_output_embeddings()
            head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=head.weight.requires_grad)
        keep_stage_modules(inner, family, ranges[number], first=first, last=last)
        applied = apply(part)
        stage = ModelStage(applied.language, objective, first=first, dtype=dtype, embedded=embedded)
        if layout.shard != "none":
            shard(stage, blocks_of(inner), mesh, gathered)
        holder.append(part)
        stages.append(stage)
        below = applied.under(str(position))
        pieces, summed = pieces | below.pieces, summed | below.partial
        aliases |= {f"{position}.{name}": name for name, _ in part.named_parameters()}
        aliases |= {f"{position}.{name}": name for name, _ in part.named_buffers()}
        if last and tied and not first:
            aliases[f"{position}.{prefix}{head_name}.weight"] = f"{prefix}{embedding}"
    materialise(holder, _Renamed(built.weights, aliases), pieces, mesh.device, offload=layout.offload == "params")
    for stage in stages:
        stage._apply(_same)
    trained = [
        Trained(
            p,
            split=name in pieces,
            partial=name in summed,
            copy=aliases[name] != name.partition(".")[2],
            tied=tied and aliases[name] == f"{prefix}{embedding}",
        )
        for name, p in holder.named_parameters()
        if p.requires_grad
    ]
    return ParallelModel(
        model=holder,
        # A stage without adapters has no dropout, and all stages must lay out the same rows.
        language=replace(stages[0].language, head=None, dropout=has_dropout(whole)),
        root=None,
        pipeline=Pipeline(stages, mesh, whole.config.get_text_config().hidden_size, dtype),
        shards=NamedShards(pieces, aliases),
        gradients=Gradients(trained, mesh, reduce_batch=layout.shard == "none"),
    )


@dataclass(frozen=True)
class _Applied:
    """What the steps up to the offload of activations give for a model or a stage.

    Attributes:
        language: the model as training uses it; its head is None if another stage has it.
        pieces: by the names of the parameters, adapters included, that are split over the tensor processes.
        partial: names of the parameters whose gradients must be summed over the tensor processes.
    """

    language: LanguageModel
    pieces: dict[str, Piece]
    partial: set[str]

    def under(self, path: str) -> _Applied:
        """Returns the same for a model at a path of another one."""
        pieces = {f"{path}.{name}": piece for name, piece in self.pieces.items()}
        return _Applied(self.language, pieces, {f"{path}.{name}" for name in self.partial})


def _apply(model: nn.Module, *, mesh: Mesh, balance: RouterBalance | None, compiled: bool, float8: Float8) -> _Applied:
    """Splits the tensors of a model or a stage, then applies float8, compile, recompute and offload to its blocks."""
    inner, prefix = unwrap(model), _prefix(model)
    family = family_of(inner.config)
    placed, across = Placed(), None
    if mesh.layout.tensor > 1:
        assert family is not None
        placed = split_tensors(inner, family, mesh)
        across = split_vocabulary(inner, family, mesh, placed)
    if mesh.layout.async_tensor:
        enable_async_tensor(mesh)
    apply_to_blocks(inner, mesh.device, mesh.layout, family, compiled=compiled, float8=float8)
    head = head_of(inner) if family is not None else None
    head = replace(head, across=across, compiled=compiled) if head is not None else None
    pieces = {f"{prefix}{name}": piece for name, piece in placed.pieces.items()}
    ids = tuple(virtual_ids(inner))
    language = LanguageModel(inner, head, _packs(model), ids, balance, dropout=has_dropout(inner))
    return _Applied(language, pieces, _partial(model, placed, prefix, mesh.layout))


def _partial(model: nn.Module, placed: Placed, prefix: str, layout: Layout) -> set[str]:
    """Names of parameters whose gradients must be summed over the tensor processes. With sequence parallelism
    these are all whole ones, as each process applies them to its own tokens."""
    if layout.sequence:
        return {name for name, _ in model.named_parameters() if name.removeprefix(prefix) not in placed.pieces}
    critic = {name for name, _ in model.named_parameters() if name.startswith(f"{prefix}{VALUE_HEAD}.")}
    return {f"{prefix}{name}" for name in placed.partial} | critic  # one of the tensor processes computes it


def _packs(model: nn.Module) -> bool:
    """Returns whether the model supports packed rows."""
    return family_of(unwrap(model).config) is not None and not has_prefix(model)


def _prefix(model: nn.Module) -> str:
    """Returns the prefix of a model's parameters in the model with adapters that wraps it; empty without adapters."""
    return "" if model is unwrap(model) else "base_model.model."


def _gathered_in(layout: Layout, compute: torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype that gathered weights are cast to; None for their own."""
    return None if layout.offload == "params" else compute  # the host keeps float32, and casting there is slow


def _held_in(model: nn.Module) -> torch.dtype:
    """Returns the dtype of the weights; of the frozen ones, if any, since trained ones are wider."""
    kinds = [p.dtype for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    return kinds[0] if kinds else next(p.dtype for p in model.parameters())


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class _Renamed:
    """Weights by their names in the stages."""

    source: WeightSource
    aliases: Mapping[str, str]

    def read(self, name: str, rows: Rows) -> Tensor:
        return self.source.read(self.aliases.get(name, name), rows)
