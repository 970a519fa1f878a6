"""The language-model head: logits, cross entropy and log-probabilities of targets, without full logits.

Shapes: N predicted positions, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stoker.models.autocast import in_product_dtype
from stoker.models.chunked_head import LogitForm, VocabularySplit
from stoker.models.compiled_scores import transform
from stoker.models.head_functions import CrossEntropy, Scores

VALUE_HEAD = "value_head"  # the module of a model that has a critic; see `stoker.models.critic`
OWN_CRITIC = "critic_model"  # the module of a policy's model that is a separate critic


@dataclass(frozen=True)
class TokenScores:
    """The scores of the targets, both of shape (N,).

    Attributes:
        log_probability: of each target, with gradient.
        entropy: of the distribution at each target, in nats; None if not asked for.
    """

    log_probability: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class Head:
    """The map from hidden states to logits: ``softcap * tanh(scale * (h W^T + b) / softcap)``.

    Attributes:
        linear: the output embedding.
        scale: factor of the logits (Cohere, Granite); 1 for most.
        softcap: bound of the logits (Gemma 2); None for most.
        across: the processes that the vocabulary is split over; None if ``linear`` is whole. The gradient of the
            hidden states then covers this process' part of the vocabulary only, and must be summed.
        compiled: whether scores and cross entropy of a whole vocabulary are compiled; not in float64.
    """

    linear: nn.Linear
    scale: float = 1.0
    softcap: float | None = None
    across: VocabularySplit | None = None
    compiled: bool = False

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Returns all logits of a few positions, shape (N, V)."""
        return transform(self.linear(hidden_ND) * self.scale, self.softcap)

    def likeliest(self, hidden_ND: Tensor) -> Tensor:
        """Returns the most likely token of each of a few positions, shape (N,)."""
        top_N, best_N = self.logits(hidden_ND).max(dim=-1)
        if self.across is None:
            return best_N
        highest_N = top_N.clone()
        self.across.maximum(highest_N)
        chosen_N = torch.where(top_N == highest_N, best_N + self.across.start, -1)
        self.across.maximum(chosen_N)
        return chosen_N

    def tempered(self, temperature: float) -> Head:
        """Returns the head whose logits are divided by a temperature."""
        softcap = None if self.softcap is None else self.softcap / temperature
        return self if temperature == 1 else replace(self, scale=self.scale / temperature, softcap=softcap)

    def cross_entropy(self, hidden_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        """(summed cross entropy, float32 scalar with gradient; number of correct predictions, int64 scalar).

        Cheaper than `scores`: gradients are computed together with the loss, from the same logits.
        """
        return CrossEntropy.apply(
            in_product_dtype(hidden_ND),
            self.linear.weight,
            self.linear.bias,
            target_N,
            self._form,
            torch.is_grad_enabled(),
        )

    def scores(
        self, hidden_ND: Tensor, target_N: Tensor, *, entropy: bool = False, entropy_gradient: bool = False
    ) -> TokenScores:
        """Returns the log-probability of each target, and optionally the entropy, in float32.

        The backward pass of a trained head, or of entropies, computes the logits again, chunk by chunk.

        Args:
            entropy_gradient: whether the entropy is part of the loss; otherwise it has no gradient.
        """
        log_probability_N, entropy_N = Scores.apply(
            in_product_dtype(hidden_ND),
            self.linear.weight,
            self.linear.bias,
            target_N,
            self._form,
            entropy,
            entropy_gradient,
            torch.is_grad_enabled(),
        )
        return TokenScores(log_probability_N, entropy_N if entropy else None)

    @property
    def _form(self) -> LogitForm:
        return LogitForm(self.scale, self.softcap, self.across, self.compiled)


@dataclass(frozen=True)
class LogitsHead:
    """The interface of `Head` for a model that computes its own logits; they are divided by ``temperature``."""

    temperature: float = 1.0

    def tempered(self, temperature: float) -> LogitsHead:
        """Same as `Head.tempered`."""
        return LogitsHead(self.temperature * temperature)

    def likeliest(self, logits_NV: Tensor) -> Tensor:
        """See `Head.likeliest`."""
        return logits_NV.argmax(-1)

    def cross_entropy(self, logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        """See `Head.cross_entropy`."""
        logits_NV = _widened(logits_NV) / self.temperature
        loss = nn.functional.cross_entropy(logits_NV, target_N, reduction="sum")
        return loss, (logits_NV.argmax(-1) == target_N).sum()

    def scores(
        self, logits_NV: Tensor, target_N: Tensor, *, entropy: bool = False, entropy_gradient: bool = False
    ) -> TokenScores:
        """See `Head.scores`."""
        log_p_NV = (_widened(logits_NV) / self.temperature).log_softmax(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropy_N = torch.special.entr(log_p_NV.exp()).sum(-1) if entropy else None
        return TokenScores(log_p_NV.gather(1, target_N[:, None]).squeeze(1), entropy_N)


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def head_of(model: nn.Module) -> Head | None:
    """Returns the head of a causal language model; None if it is not a plain linear layer."""
    linear = model.get_output_embeddings()  # type: ignore[operator]
    if type(linear) is not nn.Linear:
        return None
    config: Any = model.config
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(linear, float(scale), getattr(config, "final_logit_softcapping", None))
