"""Rows for new tokens in the embedding and the head; each is the mean of the rows of the token's pieces.

Each process reads its own part of the weights, so a new row is computed when it is read, in every layout from the same
numbers in the same order.

Shapes: N new rows, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.errors import UserError
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.tokenizer_extension import Extension
from stoker.models.load_model import Blank
from stoker.models.meta_model import set_parameter
from stoker.models.tuning.adapter_targets import is_within, modules_trained_whole
from stoker.models.weight_source import InMemoryWeights, Rows, WeightSource, all_rows

AT_ONCE = 1 << 13  # old rows read at a time


@dataclass(frozen=True)
class NewRows:
    """Rows that no checkpoint of the model has trained.

    Attributes:
        first: the first of them, in each of the tensors.
        names: the tensors with a row for each token: the embedding, the head, its bias.
    """

    first: int
    names: frozenset[str]


@dataclass(frozen=True)
class Enlarged:
    """Weights with rows for new tokens.

    Attributes:
        base: the weights without them.
        names: the tensors with a row for each token.
        extension: the pieces of each new token.
    """

    base: WeightSource
    names: frozenset[str]
    extension: Extension

    def read(self, name: str, rows: Rows) -> Tensor:
        """See `WeightSource`; old rows are bit-equal to the base's."""
        if name not in self.names:
            return self.base.read(name, rows)
        first, (start, stop), rest = self.extension.first, (rows[0].start, rows[0].stop), rows[1:]
        old = self.base.read(name, (slice(start, min(stop, first)), *rest)) if start < first else None
        if stop <= first:
            assert old is not None
            return old
        new = self._means(name, max(start, first) - first, stop - first, rest)
        return new if old is None else torch.cat([old, new.to(old)])

    def _means(self, name: str, start: int, stop: int, rest: Rows) -> Tensor:
        """New rows ``start`` to ``stop``, counted from the first: the means of their pieces, summed in float64.

        Rows after the last token, which only pad the matrix, get the mean of all old rows.
        """
        cuts = self.extension.pieces[start:stop]
        owner = torch.tensor([i for i, cut in enumerate(cuts) for _ in cut], dtype=torch.int64)
        piece = torch.tensor([number for cut in cuts for number in cut], dtype=torch.int64)
        filling = stop - start - len(cuts)
        sums: Tensor | None = None
        total: Tensor | None = None
        kept = torch.float32
        for begin in range(0, self.extension.first, AT_ONCE):
            here = (piece >= begin) & (piece < begin + AT_ONCE)
            if not filling and not here.any():
                continue
            block = self.base.read(name, (slice(begin, min(self.extension.first, begin + AT_ONCE)), *rest))
            kept, block = block.dtype, block.double()
            if sums is None or total is None:
                sums, total = block.new_zeros(stop - start, *block.shape[1:]), block.new_zeros(block.shape[1:])
            sums.index_add_(0, owner[here], block[piece[here] - begin])
            total += block.sum(0)
        assert sums is not None and total is not None
        counts = sums.new_tensor([len(cut) for cut in cuts])
        sums[: len(cuts)] /= counts.view(-1, *[1] * (sums.dim() - 1))
        sums[len(cuts) :] = total / self.extension.first
        return sums.to(kept)


def add_embedding_rows(blank: Blank, extension: Extension) -> tuple[Blank, NewRows]:
    """Returns the model with a row for every token of an extended tokenizer; tensors on the meta device stay there.

    Must come before fused layers are split and adapters inserted.

    Raises:
        UserError: the model lacks rows for tokens that the extended tokenizer had before, or cannot have new ones.
    """
    model = blank.model
    tensors = rows_by_token(model)
    known = min(tensor.shape[0] for tensor in tensors.values())
    if known < extension.first:
        raise UserError(
            f"model.tokenizer extends one of {extension.first:,} tokens ({extension.extends}), and this model has "
            f"rows for {known:,}: it is not that tokenizer's model"
        )
    rows = extension.rows(known)
    text: Any = model.config.get_text_config()
    if getattr(text, "hidden_size_per_layer_input", None) and text.vocab_size_per_layer_input < rows:
        raise UserError("model.tokenizer: every block of this model embeds the tokens, and new ones have no rows there")
    names = frozenset(tensors)
    held = {name: tensor.data for name, tensor in tensors.items() if not tensor.is_meta}
    source = Enlarged(InMemoryWeights(held) if held else blank.weights, names, extension)
    made: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        shape = torch.Size((rows, *tensor.shape[1:]))
        if id(tensor) not in made:
            new = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            if name in held:
                new = source.read(name, all_rows(shape)).to(tensor)
            made[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad)
        set_parameter(model, name, made[id(tensor)])
    set_vocabulary(model, rows)
    return replace(blank, weights=blank.weights if held else source), NewRows(extension.first, names)


def why_rows_untrained(model: PreTrainedModel, new: NewRows, tune: TuneBlock) -> str | None:
    """Returns why the rows of new tokens would never be trained; None if they are.

    Raises:
        UserError: a name in ``tune.modules_to_save`` selects no module.
    """
    if tune.method == "full":
        return None
    layers = sorted({name.rpartition(".")[0] for name in new.names})
    whole = modules_trained_whole(model, tune.modules_to_save)
    missing = [layer for layer in layers if not is_within(layer, whole)]
    if not missing:
        return None
    names = ", ".join(layer.rpartition(".")[2] for layer in layers)
    return f"`tune: {tune.method}` freezes {missing[0]}, and new tokens are learned only if {names} are trained"


def rows_by_token(model: PreTrainedModel) -> Mapping[str, nn.Parameter]:
    """Returns the parameters with a row for each token, by all of their names."""
    modules: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if any(module is known for known in modules):
            found |= {f"{name}.{key}": parameter for key, parameter in module.named_parameters(recurse=False)}
    return found


def set_vocabulary(model: PreTrainedModel, rows: int) -> None:
    """Sets the number of rows in the configuration and the modules."""
    model.config.get_text_config().vocab_size = rows
    if hasattr(model.config, "vocab_size"):
        model.config.vocab_size = rows
    for module in model.modules():
        if isinstance(getattr(module, "vocab_size", None), int):
            module.vocab_size = rows  # type: ignore[assignment]
    embedding: Any = model.get_input_embeddings()
    embedding.num_embeddings = rows
    head: Any = model.get_output_embeddings()
    if head is not None:
        head.out_features = rows
