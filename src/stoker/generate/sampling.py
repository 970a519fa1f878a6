"""Sampling of the next token of each row from its logits.

A sample is one uniform number, a function of the request's seed and the token's index in its answer, looked up in the
cumulative distribution by token id. So an answer is independent of the rest of the batch.

Shapes: B rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.generate.request import Generation, Sampling, Token
from stoker.hardware.process_device import on_device, widest_float

CANDIDATES = 256  # tokens that are sorted first; more are, where these have less probability than top-p requires


def uniform(seed: int, number: int) -> float:
    """Returns the uniform number in [0, 1) for a token's index in an answer (Philox; Salmon et al., 2011)."""
    bits = np.random.Philox(key=seed % 2**64, counter=number).random_raw()
    return float(bits >> 11) * 2.0**-53


def next_tokens(logits_BV: Tensor, generations: Sequence[Generation]) -> list[Token]:
    """Samples the next token of each generation, with its log-probability.

    Args:
        logits_BV: logits of any precision; not changed.
    """
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    requests = [generation.request for generation in generations]
    scaled_BV = _adjusted(logits_BV, generations)
    totals_B1 = scaled_BV.logsumexp(-1, keepdim=True)
    drawn = [row for row, request in enumerate(requests) if request.sampling.temperature > 0]
    if len(drawn) == len(requests):  # the usual case: rows are not copied
        chosen_B = _draw(scaled_BV, totals_B1, generations)
    else:
        chosen_B = scaled_BV.argmax(-1)
        if drawn:
            rows = on_device(torch.tensor(drawn), chosen_B.device)
            sampled = scaled_BV[rows], totals_B1[rows], [generations[row] for row in drawn]
            chosen_B[rows] = _draw(*sampled)
    scores_B = (scaled_BV.gather(1, chosen_B[:, None]) - totals_B1).squeeze(1)
    listed = max(request.alternatives for request in requests)
    others = alternatives(scaled_BV - totals_B1 if listed else scaled_BV, listed)
    drawn_with = zip(chosen_B.tolist(), scores_B.tolist(), others, requests, strict=True)
    return [Token(token, score, best[: request.alternatives]) for token, score, best, request in drawn_with]


def alternatives(log_p_NV: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Returns the likeliest tokens of each row and their log-probabilities, in descending order."""
    if not count:
        return [()] * len(log_p_NV)
    best = log_p_NV.topk(min(count, log_p_NV.shape[1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [tuple(zip(ids, values, strict=True)) for ids, values in rows]


def _adjusted(logits_BV: Tensor, generations: Sequence[Generation]) -> Tensor:
    """Returns the logits after constraints, penalties and temperature."""
    plain = True
    for row, generation in enumerate(generations):
        request = generation.request
        early = len(generation.tokens) < request.min_tokens
        if not (early or request.constraint or request.sampling.changes_logits):
            continue
        if plain:
            logits_BV, plain = logits_BV.clone(), False
        logits_V = logits_BV[row]
        if request.sampling.changes_logits:
            _penalise(logits_V, request.sampling, generation)
        if early and request.stop_ids:
            logits_V[_ids_of(request.stop_ids, logits_V)] = -torch.inf
        if request.constraint is not None:
            request.constraint.mask(logits_V)
    temperatures = [generation.request.sampling.temperature or 1.0 for generation in generations]
    if any(t != 1.0 for t in temperatures):
        return logits_BV / on_device(torch.tensor(temperatures, dtype=logits_BV.dtype), logits_BV.device)[:, None]
    return logits_BV


def _penalise(logits_V: Tensor, sampling: Sampling, generation: Generation) -> None:
    if sampling.repetition_penalty != 1.0:
        penalty = sampling.repetition_penalty
        penalised_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
        logits_V.copy_(torch.where(_seen(generation, logits_V), penalised_V, logits_V))
    if generation.tokens and (sampling.presence_penalty or sampling.frequency_penalty):
        answer = Counter(generation.ids)
        ids = _ids_of(answer, logits_V)
        counts = on_device(torch.tensor([answer[i] for i in sorted(answer)], dtype=logits_V.dtype), logits_V.device)
        logits_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, bias in sampling.bias:
        logits_V[token] += bias


def _seen(generation: Generation, logits_V: Tensor) -> Tensor:
    """Returns whether each token is in the prompt or the answer, shape (V,); a step adds its own token only."""
    if generation.seen_V is None:
        generation.seen_V, generation.seen = torch.zeros_like(logits_V, dtype=torch.bool), 0
        generation.seen_V[_ids_of(set(generation.request.prompt), logits_V)] = True
    for token in generation.tokens[generation.seen :]:
        generation.seen_V[token.id] = True
    generation.seen = len(generation.tokens)
    return generation.seen_V


def _ids_of(tokens: Collection[int], logits_V: Tensor) -> Tensor:
    """Returns tokens, ascending, on the device of logits; the host does not wait for it."""
    return on_device(torch.tensor(sorted(tokens)), logits_V.device)


def _draw(scaled_BV: Tensor, totals_B1: Tensor, generations: Sequence[Generation]) -> Tensor:
    numbers = [uniform(g.request.sampling.seed, len(g.tokens)) for g in generations]
    device = scaled_BV.device
    # The host does not wait for the step that computes the logits, so that this work is launched beside it.
    u_B1 = on_device(torch.tensor(numbers, dtype=widest_float(device)), device)[:, None]
    samplings = [g.request.sampling for g in generations]
    probabilities_BV = (scaled_BV - totals_B1).exp()
    if any(sampling.truncates for sampling in samplings):
        least_B1 = least_logits(scaled_BV, totals_B1, samplings)
        probabilities_BV = probabilities_BV.where(scaled_BV >= least_B1, 0.0)
    return _look_up(probabilities_BV, u_B1)


def least_logits(scaled_BV: Tensor, totals_B1: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Returns the least logit that each row may sample after top-k, top-p and min-p, applied in this order, shape
    (B, 1).

    Tokens with equal logits are sampled or not together. The host reads from the device once for all rows, and once
    more where the likeliest tokens have less probability than a row requires.

    Args:
        totals_B1: logarithms of the sums of the exponentials of the logits.
    """
    device, vocabulary, wide = scaled_BV.device, scaled_BV.shape[1], widest_float(scaled_BV.device)
    settings = [(s.truncates, s.top_k or vocabulary, s.top_p if s.top_p < 1 else torch.inf, s.min_p) for s in samplings]
    truncates_B1, top_k_B1, top_p_B1, min_p_B1 = on_device(torch.tensor(settings, dtype=wide), device).split(1, dim=1)
    whole_B1 = truncates_B1 == 0
    count = min(vocabulary, max(s.top_k or CANDIDATES for s in samplings if s.truncates))
    while True:
        values_BC = scaled_BV.topk(count).values
        left_BC = torch.arange(count, device=device) < top_k_B1
        p_BC = (values_BC.to(wide) - totals_B1).exp() * left_BC
        # The share refers to the tokens left by top-k.
        share_B1 = top_p_B1 * p_BC.sum(1, keepdim=True).where(top_k_B1 < vocabulary, 1.0)
        kept_BC = left_BC & (p_BC.cumsum(1) - p_BC < share_B1) & (p_BC >= min_p_B1 * p_BC[:, :1])
        kept_B1 = kept_BC.sum(1, keepdim=True).clamp(min=1)
        enough_B1 = (kept_B1 < count) | (top_k_B1 <= count) | whole_B1
        if count == vocabulary or bool(enough_B1.all()):
            return values_BC.gather(1, kept_B1 - 1).masked_fill(whole_B1, -torch.inf)
        count = min(vocabulary, 16 * count)


def _look_up(probabilities_BC: Tensor, u_B1: Tensor) -> Tensor:
    """Returns the first candidate whose cumulative probability exceeds the share ``u`` of the total, shape (B,)."""
    cumulative_BC = probabilities_BC.to(u_B1.dtype).cumsum(-1)
    found_B1 = torch.searchsorted(cumulative_BC, u_B1 * cumulative_BC[:, -1:], right=True)
    # Rounding can put the share at the very end; then the last token with a probability is taken.
    last_B1 = torch.searchsorted(cumulative_BC, cumulative_BC[:, -1:].contiguous())
    # If probabilities are not numbers, the index is clamped: one after the last token would end all work on a GPU.
    return torch.minimum(found_B1, last_B1).clamp_(max=cumulative_BC.shape[1] - 1).squeeze(1)
