"""How documents are laid out for a model: packed into one row where the model keeps them apart, in padded rows where not.

Whether a model keeps packed documents apart is not believed but tried, once at the start of a run, on the
model itself: two short documents in one row must give the hidden states that each gives alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.models import packed
from stoker.models.head import Head, head_of

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative, by precision; a leak shows as 5e-2 and more
PADDING = 1.25  # padded rows are grouped by length until they hold at most this much more than their tokens


@dataclass(frozen=True)
class Inputs:
    """What one forward pass gets, and which positions of it are predicted.

    Attributes:
        ids: token ids, shape (B, T).
        positions: position ids, shape (B, T); None where the model counts them itself.
        mask: 1 for tokens, 0 for padding, shape (B, T); None without padding.
        lengths: documents of a packed row; None for padded rows.
        predict: flat indices of the positions whose next token is trained, shape (N,).
        targets: those next tokens, shape (N,).
    """

    ids: Tensor
    positions: Tensor | None
    mask: Tensor | None
    lengths: tuple[int, ...] | None
    predict: Tensor
    targets: Tensor


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model as training sees it: hidden states, head, and how rows are laid out.

    Attributes:
        model: the transformers model, with adapters inside where there are any.
        head: its head; None where it is not a plain linear layer, so that the model computes its own logits.
        packs: whether documents are packed into one row.
    """

    model: PreTrainedModel
    head: Head | None
    packs: bool

    def hidden(self, inputs: Inputs) -> Tensor:
        """The last hidden states, shape (B, T, D)."""
        return self.model.base_model(**_arguments(inputs)).last_hidden_state  # type: ignore[no-any-return]

    def loss(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(summed cross entropy of the trained tokens, how many of them were the most likely token)."""
        if self.head is not None:
            hidden = self.hidden(inputs)
            return self.head.loss(hidden.flatten(0, 1)[inputs.predict], inputs.targets)
        logits = self.model(**_arguments(inputs)).logits.flatten(0, 1)[inputs.predict].float()
        loss = nn.functional.cross_entropy(logits, inputs.targets, reduction="sum")
        return loss, (logits.argmax(-1) == inputs.targets).sum()

    def lay_out(self, rows: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device) -> list[Inputs]:
        """The forward passes of a micro-batch: one when packed, one or more of even lengths when padded.

        Args:
            rows: (token ids, trained mask) of each document.
        """
        return [_pack(rows, device)] if self.packs else [_pad(group, device) for group in _by_length(rows)]


def _arguments(inputs: Inputs) -> dict[str, Tensor | bool]:
    arguments: dict[str, Tensor | bool] = {"input_ids": inputs.ids, "use_cache": False}
    if inputs.positions is not None:
        arguments["position_ids"] = inputs.positions
    if inputs.mask is not None:
        arguments["attention_mask"] = inputs.mask
    return arguments


def _pack(rows: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device) -> Inputs:
    lengths = tuple(len(ids) for ids, _ in rows)
    ids = np.concatenate([ids for ids, _ in rows]).astype(np.int64)
    positions = np.concatenate([np.arange(n) for n in lengths])
    trained = np.concatenate([mask for _, mask in rows])
    trained[np.cumsum((0, *lengths[:-1]))] = False  # a document's first token is predicted by nothing
    predict = np.flatnonzero(trained) - 1
    return Inputs(
        torch.from_numpy(ids)[None].to(device),
        torch.from_numpy(positions)[None].to(device),
        None,
        lengths,
        torch.from_numpy(predict).to(device),
        torch.from_numpy(ids[predict + 1]).to(device),
    )


def _by_length(
    rows: Sequence[tuple[np.ndarray, np.ndarray]],
) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Groups of similar length, so that little of a padded batch is padding."""
    groups: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for row in sorted(rows, key=lambda row: len(row[0])):
        group = groups[-1] if groups else []
        tokens = sum(len(ids) for ids, _ in group) + len(row[0])
        if group and len(row[0]) * (len(group) + 1) <= PADDING * tokens:
            group.append(row)
        else:
            groups.append([row])
    return groups


def _pad(rows: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device) -> Inputs:
    longest = max(len(ids) for ids, _ in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=np.int64)
    trained = np.zeros((len(rows), longest), dtype=bool)
    for i, (row_ids, row_trained) in enumerate(rows):
        ids[i, : len(row_ids)], mask[i, : len(row_ids)] = row_ids, 1
        trained[i, 1 : len(row_ids)] = row_trained[1:]
    predict = np.flatnonzero(trained) - 1
    return Inputs(
        torch.from_numpy(ids).to(device),
        None,
        torch.from_numpy(mask).to(device) if (mask == 0).any() else None,
        None,
        torch.from_numpy(predict).to(device),
        torch.from_numpy(ids.reshape(-1)[predict + 1]).to(device),
    )


@torch.no_grad()
def lay_out_for(model: PreTrainedModel) -> LanguageModel:
    """Tries packed attention and the separate head on the model; keeps each where it gives what the model gives."""
    training = model.training
    model.eval()
    try:
        head = head_of(model)
        if head is not None and not _head_agrees(model, head):
            head = None
        return LanguageModel(model, head, _isolates(model))
    finally:
        model.train(training)


def _probe_rows(model: PreTrainedModel) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [(generator.integers(0, vocabulary, n).astype(np.uint32), np.ones(n, bool)) for n in (7, 5)]


def _head_agrees(model: PreTrainedModel, head: Head) -> bool:
    inputs = _pad(_probe_rows(model)[:1], model.device)
    own = model(input_ids=inputs.ids, use_cache=False).logits[0]
    hidden = model.base_model(input_ids=inputs.ids, use_cache=False).last_hidden_state[0]
    return _close(head.logits(hidden), own)


def _isolates(model: PreTrainedModel) -> bool:
    before = model.config._attn_implementation
    rows = _probe_rows(model)
    whole = LanguageModel(model, None, True)
    try:
        alone = [whole.hidden(_pad([row], model.device))[0] for row in rows]
        packed.register()
        model.set_attn_implementation(packed.NAME)
        inputs = _pack([(ids, mask.copy()) for ids, mask in rows], model.device)
        with packed.documents(inputs.lengths):
            together = whole.hidden(inputs)[0]
        isolated = _close(together, torch.cat(alone))
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        isolated = False  # this family does not take its attention or its positions from outside
    if not isolated and before is not None:
        model.set_attn_implementation(before)
    return isolated


def _close(a: Tensor, b: Tensor) -> bool:
    scale = float(b.abs().max()) or 1.0
    return a.shape == b.shape and float((a - b).abs().max()) <= TOLERANCE.get(b.dtype, 1e-4) * scale
