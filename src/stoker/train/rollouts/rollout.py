"""One answer of a policy, with per-token values."""

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
        sample: index of the answer among those to the prompt.
        source, row: origin of the prompt.
        prompt_ids, answer_ids: token ids; the answer's stop token is included.
        ended: why the answer ended.
        rewards: unweighted rewards by name.
        score: weighted sum of the rewards, with penalties.
        own: whether the model sampled each token of the answer; None for all. Other tokens are the environment's.
        tokens: values of the answer's own tokens by name, shape (own tokens,):

            - ``sampled``: log-probability that the generation engine gave at sampling;
            - ``old``: log-probability in the training forward pass, before the first step on this answer;
            - ``reference``: log-probability under the reference model;
            - ``entropy``: entropy of the distribution that the token was sampled from, nats;
            - ``value``, ``return``: the critic's estimate and its training target;
            - ``reward``: input of the advantages: the score at the last token, minus the KL penalty where it is in the
              reward; absent where only whole answers are rewarded;
            - ``advantage``: factor of the policy gradient.
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
        """Number of tokens that the model sampled."""
        return len(self.answer_ids) if self.own is None else int(self.own.sum())

    @property
    def stopped(self) -> bool:
        """Whether the answer ended with a stop token."""
        return self.ended == "stop"

    @property
    def kl(self) -> float | None:
        """Log-ratio to the reference, summed over the tokens (estimator k1); None without a reference."""
        reference = self.tokens.get("reference")
        return None if reference is None else float((self.tokens["old"] - reference).sum())

    def token_values(self) -> dict[str, np.ndarray]:
        """Returns the values of all tokens by name, and ``kl``, the log-ratio to the reference, if there is one.

        Tokens that the model did not sample have NaN.
        """
        reference = self.tokens.get("reference")
        values = self.tokens if reference is None else {**self.tokens, "kl": self.tokens["old"] - reference}
        if self.own is None:
            return values
        found = {name: np.full(len(self.answer_ids), np.nan) for name in values}
        for name, own in values.items():
            found[name][self.own] = own
        return found
