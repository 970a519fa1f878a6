"""The passes of a policy's step: over its answers, over the same answers by the critic, and empty ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from stoker.models.attention.collate import Inputs
from stoker.train.rollouts.actor_critic import RETURN
from stoker.train.rollouts.policy_objective import OLD, PTX
from stoker.train.rollouts.policy_settings import PolicySettings
from stoker.train.rollouts.rollout import Rollout
from stoker.train.rollouts.shaping import token_weights
from stoker.train.rollouts.token_scores import by_target
from stoker.train.task import Part

CRITIC_COLUMNS = ("value", RETURN, "weight")


def policy_pass(
    inputs: Inputs,
    rollouts: Sequence[Rollout],
    numbers: Sequence[int],
    settings: PolicySettings,
    *,
    scored: bool,
    idle: bool,
) -> Part:
    """Returns the policy's pass over answers that are laid out.

    Args:
        numbers: indices of the rollouts within their iterations.
        scored: whether the answers have the log-probabilities that their ratios are taken to.
        idle: whether only the critic learns, so that the answers have no weight.
    """
    chosen = inputs.given["number"].tolist()
    rows = [rollouts[i] for i in chosen]
    names = [OLD, "advantage"] if scored else ["advantage"]
    if settings.kl and not settings.kl_in_reward:
        names.append("reference")
    columns = {name: [row.tokens[name] for row in rows] for name in names}
    columns["weight"] = [weight * (not idle) for weight in token_weights(rows, settings)]
    targets = len(inputs.targets) if settings.weight == "token" else len(rows)
    balance = 0.0 if idle else None if settings.weight == "token" else 1.0
    given = by_target(inputs, columns) | {"number": torch.tensor([numbers[i] for i in chosen])}
    return Part(replace(inputs, given=given, balance=balance), targets=targets, tokens=inputs.tokens)


def critic_pass(inputs: Inputs, rollouts: Sequence[Rollout], settings: PolicySettings, *, own: bool) -> Part:
    """Returns the critic's pass over the same answers; its loss is over the policy's targets, so it has no own ones.

    The routers' auxiliary loss is in the policy's passes.

    Args:
        own: whether the critic is a model of its own.
    """
    rows = [rollouts[i] for i in inputs.given["number"].tolist()]
    columns = {name: [row.tokens[name] for row in rows] for name in ("value", RETURN)}
    columns["weight"] = token_weights(rows, settings)
    inputs = replace(inputs, given=by_target(inputs, columns), balance=0.0)
    return Part(inputs, targets=0, tokens=inputs.tokens, other_model=own)


def empty_pass(empty: Part, kind: str, *, own_critic: bool) -> Part:
    """Returns a pass of a kind without tokens, made of the task's empty one."""
    columns = {PTX: (PTX,), RETURN: CRITIC_COLUMNS}.get(kind, ())
    given = {name: torch.zeros(0, device=empty.row.targets.device) for name in columns}
    return replace(empty, inputs=replace(empty.row, given=given), other_model=kind == RETURN and own_critic)


def kind_of(part: Part) -> str:
    """Returns the kind of a part's pass, by the inputs given to it alone; empty for the policy's over answers."""
    given = part.inputs.given if isinstance(part.inputs, Inputs) else ()
    return next((kind for kind in (PTX, RETURN) if kind in given), "")
