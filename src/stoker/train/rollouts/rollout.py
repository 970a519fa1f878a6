"""One answer of a policy, with what is known of each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stoker.generate.request import Ending


@dataclass
class Rollout:
    """An answer, from its sampling to its advantages.

    Attributes:
        prompt: number of the prompt in the order of the run; in a later epoch the same row has another number.
        sample: number of the answer among those to the prompt.
        source, row: where the prompt comes from.
        prompt_ids, answer_ids: token ids; the answer's stop token is included.
        ended: why the answer ended.
        rewards: by name, unweighted.
        score: their weighted sum, with penalties: what the answer is worth.
        own: which tokens of the answer the model has drawn; None for all. Others are an environment's, between turns.
        tokens: values of the answer's own tokens by name, shape (own tokens,):

            - ``sampled``: log-probability as the engine gave it when the token was drawn;
            - ``old``: log-probability in the training forward pass, before the first step on this answer;
            - ``reference``: log-probability under the reference model;
            - ``entropy``: of the distribution that the token was drawn from, nats;
            - ``value``, ``return``: the critic's estimate, and what it should have been;
            - ``reward``: what advantages are made of: the score at the last token, less the KL penalty where that is in
              the reward; absent where only whole answers are rewarded;
            - ``advantage``: what the policy's gradient is multiplied by.
    """

    prompt: int
    sample: int
    source: str
    row: int
    prompt_ids: np.ndarray
    answer_ids: np.ndarray
    ended: Ending
    rewards: dict[str, float] = field(default_factory=dict)
    score: float = 0.0
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    own: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Tokens that the model has drawn."""
        return len(self.answer_ids) if self.own is None else int(self.own.sum())

    @property
    def stopped(self) -> bool:
        """Whether the answer ended with a stop token."""
        return self.ended == "stop"

    @property
    def kl(self) -> float | None:
        """The log-ratio to the reference, summed over the tokens (estimator k1); None without a reference."""
        reference = self.tokens.get("reference")
        return None if reference is None else float((self.tokens["old"] - reference).sum())

    def token_values(self) -> dict[str, np.ndarray]:
        """The values of all tokens by name, and ``kl``, the log-ratio to the reference, where there is one.

        Tokens that are not the model's own have NaN.
        """
        reference = self.tokens.get("reference")
        values = self.tokens if reference is None else {**self.tokens, "kl": self.tokens["old"] - reference}
        if self.own is None:
            return values
        found = {name: np.full(len(self.answer_ids), np.nan) for name in values}
        for name, own in values.items():
            found[name][self.own] = own
        return found
