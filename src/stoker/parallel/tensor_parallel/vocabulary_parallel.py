"""The embedding and the head split by vocabulary; the cross entropy never gathers the logits.

Shapes: C positions of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.models.autocast import in_bfloat16
from stoker.models.families.facts import Family, submodule
from stoker.models.head import VALUE_HEAD
from stoker.parallel.collectives import scatter_sum, sum_from
from stoker.parallel.mesh import Mesh
from stoker.parallel.shard_spec import chunk
from stoker.parallel.tensor_parallel.tensor import Placed, enter


@dataclass
class VocabularyGroup:
    """The processes that share the vocabulary; see `stoker.models.chunked_head.VocabularySplit`."""

    group: dist.ProcessGroup
    start: int
    widest: int
    size: int

    def maximum(self, x_C: Tensor) -> None:
        """The largest over the processes, in place."""
        dist.all_reduce(x_C, op=dist.ReduceOp.MAX, group=self.group)

    def total(self, x: Tensor) -> None:
        """The sum over the processes, in place."""
        dist.all_reduce(x, group=self.group)

    def add(self, x: Tensor) -> Tensor:
        """Returns the sum over the processes, with its gradient."""
        return sum_from(x, self.group)

    def gather(self, logits_NV: Tensor) -> Tensor:
        """Gathers the logits of the whole vocabulary from those of each process' part."""
        own = logits_NV.new_full((logits_NV.shape[0], self.widest), -torch.inf)
        own[:, : logits_NV.shape[1]] = logits_NV
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, own, group=self.group)
        ends = [chunk(self.size, len(parts), number) for number in range(len(parts))]
        return torch.cat([part[:, : stop - start] for part, (start, stop) in zip(parts, ends, strict=True)], dim=1)


def split_vocabulary(model: nn.Module, family: Family, mesh: Mesh, placed: Placed) -> VocabularyGroup:
    """Splits embedding and head where the model (or stage) has them; a tied head stays tied.

    The body of the model then returns the input of the head, on every process.
    """
    group = mesh.groups["tensor"]
    assert group is not None
    share = partial(chunk, parts=mesh.layout.tensor, index=mesh.at("tensor"))
    embedding, head = submodule(model, family.embedding), model.get_output_embeddings()  # type: ignore[operator]
    embedding = embedding if isinstance(embedding, nn.Embedding) else None  # another stage has it
    head = head if isinstance(head, nn.Linear) else None
    tied = embedding is not None and head is not None and embedding.weight is head.weight
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    if embedding is not None:
        vocabulary = embedding.weight.shape[0]
        placed.split(family.embedding, embedding, "weight", 0, share)
        start, stop = share(vocabulary)
        padding = embedding.padding_idx
        embedding.padding_idx = padding - start if padding is not None and start <= padding < stop else None
        embedding.num_embeddings = stop - start
        embedding.forward = partial(_look_up, embedding, type(embedding).forward, start, stop, mesh)  # type: ignore[method-assign]
        model.base_model.register_forward_pre_hook(partial(_embed, model, family, mesh), with_kwargs=True)  # type: ignore[union-attr]
    if head is not None:
        vocabulary = vocabulary if tied else head.weight.shape[0]
        name = next(name for name, module in model.named_modules() if module is head)
        if tied:
            head.weight = embedding.weight  # type: ignore[union-attr]
            placed.pieces[f"{name}.weight"] = placed.pieces[f"{family.embedding}.weight"]
        if head.weight.shape[0] == 1:  # a score: whole on each process, and computed by the first
            placed.partial.add(f"{name}.weight")
        else:
            for key in ("bias",) if tied else ("weight", "bias"):
                placed.split(name, head, key, 0, share)
            head.out_features = head.weight.shape[0]
        model.base_model.register_forward_hook(partial(to_head, model, head, mesh))  # type: ignore[union-attr]
    widest = chunk(vocabulary, mesh.layout.tensor, 0)[1]
    return VocabularyGroup(group, share(vocabulary)[0], widest, vocabulary)


def _look_up(embedding: nn.Module, forward: object, start: int, stop: int, mesh: Mesh, ids_BT: Tensor) -> Tensor:
    """Returns the embeddings of this process' part of the vocabulary, summed over the processes; shape (B, T, D).

    Summed in the dtype of the weights: the model may add positions, or scale, before the first block rounds them.
    """
    own = (ids_BT >= start) & (ids_BT < stop)
    vectors: Tensor = forward(embedding, torch.where(own, ids_BT - start, 0))  # type: ignore[operator]
    vectors = vectors * own[..., None]
    group = mesh.groups["tensor"]
    return scatter_sum(vectors, vectors.dim() - 2, group) if mesh.splits_sequence else sum_from(vectors, group)


def _embed(model: Any, family: Family, mesh: Mesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives the body embeddings instead of ids if rows are split: some (GPT-2's) reshape hidden states to the shape of
    the ids."""
    if not mesh.splits_sequence:
        return args, kwargs
    ids_BT = kwargs.pop("input_ids")
    own_BT = ids_BT.chunk(mesh.layout.tensor, dim=1)[mesh.at("tensor")]
    further = family.from_ids(model, own_BT) if family.from_ids is not None else {}
    return args, {**kwargs, **further, "inputs_embeds": model.get_input_embeddings()(ids_BT)}


def to_head(model: nn.Module, head: nn.Linear, mesh: Mesh, _: nn.Module, _args: Any, out: Any) -> Any:
    """Forward hook of the body, which then returns the input of the head: the hidden states of all tokens, on every
    tensor process.

    They are sent in bfloat16 if products are and only logits are computed from them: scores and values are computed in
    float32.
    """
    only_logits = head.out_features > 1 and not hasattr(model, VALUE_HEAD)
    hidden_BTD = out.last_hidden_state
    out.last_hidden_state = enter(in_bfloat16(hidden_BTD) if only_logits else hidden_BTD, mesh)
    return out
