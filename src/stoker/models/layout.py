"""How documents are laid out for a model: packed into one row where the model keeps them apart, in padded rows where not.

Whether a model keeps packed documents apart is not believed but tried, once at the start of a run, on the
model itself: a few short documents in one row must give the hidden states that each gives alone.
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
from stoker.models.rows import Inputs, Row, groups_by_length, pack, pad

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative, by precision; a leak shows as 5e-2 and more


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

    def lay_out(self, rows: Sequence[Row], device: torch.device) -> list[Inputs]:
        """The forward passes of a micro-batch: one when packed, one or more of even lengths when padded.

        Args:
            rows: (token ids, trained mask) of each document.
        """
        if self.packs:
            return [pack(rows, device, share=not self._drops())]
        return [pad(group, device) for group in groups_by_length(rows)]

    def _drops(self) -> bool:
        """Whether dropout is at work: then equal beginnings of two rows are not computed alike."""
        if not self.model.training:
            return False
        in_attention = [v for k, v in vars(self.model.config).items() if "drop" in k and isinstance(v, float)]
        return any(isinstance(m, nn.Dropout) and m.p > 0 for m in self.model.modules()) or any(in_attention)


def _arguments(inputs: Inputs) -> dict[str, Tensor | bool]:
    arguments: dict[str, Tensor | bool] = {"input_ids": inputs.ids, "use_cache": False}
    if inputs.positions is not None:
        arguments["position_ids"] = inputs.positions
    if inputs.mask is not None:
        arguments["attention_mask"] = inputs.mask
    return arguments


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


def _probe_rows(model: PreTrainedModel) -> list[Row]:
    """Three rows, two of which begin alike."""
    generator = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    a, b, c = (generator.integers(0, vocabulary, n).astype(np.uint32) for n in (14, 12, 7))
    b[:10] = a[:10]
    return [(ids, np.ones(len(ids), bool)) for ids in (a, b, c)]


def _head_agrees(model: PreTrainedModel, head: Head) -> bool:
    inputs = pad(_probe_rows(model)[:1], model.device)
    own = model(input_ids=inputs.ids, use_cache=False).logits[0]
    hidden = model.base_model(input_ids=inputs.ids, use_cache=False).last_hidden_state[0]
    return _close(head.logits(hidden), own)


def _isolates(model: PreTrainedModel) -> bool:
    before = model.config._attn_implementation
    rows = _probe_rows(model)
    whole = LanguageModel(model, None, True)
    try:
        alone = []
        for row in rows:
            one = pad([row], model.device)
            alone.append(whole.hidden(one).flatten(0, 1)[one.predict])
        packed.register()
        model.set_attn_implementation(packed.NAME)
        inputs = pack(rows, model.device, share=True)
        with packed.segments(inputs.segments):
            together = whole.hidden(inputs).flatten(0, 1)[inputs.predict]
        isolated = _close(together, torch.cat(alone))
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        isolated = False  # this family does not take its attention or its positions from outside
    if not isolated and before is not None:
        model.set_attn_implementation(before)
    return isolated


def _close(a: Tensor, b: Tensor) -> bool:
    scale = float(b.abs().max()) or 1.0
    return a.shape == b.shape and float((a - b).abs().max()) <= TOLERANCE.get(b.dtype, 1e-4) * scale
