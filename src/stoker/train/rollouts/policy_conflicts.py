"""Checks of the keys that `ppo:` and `grpo:` share, with each other and with the other keys of a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.errors import Problem
    from stoker.job.conflicts.conflict_view import View


def policy_conflicts(view: View, name: str, usual_kl: float, usual_place: str) -> Iterator[Problem]:
    """Yields the problems of a job with a policy task.

    Args:
        usual_kl, usual_place: defaults of ``kl`` and ``kl_in``.
    """
    from stoker.job.keys.tune_keys import has_prefix

    written = view.given(f"{name}.rewards") and view.document.at((name, "rewards"))  # perhaps with a wrong weight
    if not written and view.value(f"{name}.reward") is None:
        message = f"`{name}` has no reward, so there is nothing to learn from"
        yield from view.at_each([f"{name}.rewards"], message, "write rewards: [numeric], or reward: RUN")
    environment = view.value(f"{name}.environment")
    if environment is not None and not environment.startswith("python:"):
        message = f"{environment!r} names no function"
        yield from view.at_each([f"{name}.environment"], message, "write python:MODULE:FUNCTION")
    if view.differs(f"{name}.turns") and environment is None:
        message = "without an environment an answer has one turn"
        yield from view.at_each([f"{name}.turns"], message, "remove it, or write environment: python:MODULE:FUNCTION")
    if view.value("train.pack") is True:
        message = f"`task: {name}` samples its answers, so there is nothing to pack beforehand"
        yield from view.at_each(["train.pack"], message, "remove it: answers are always packed")
    for axis in ("pipeline", "context"):
        if view.value(f"parallel.{axis}") > 1:
            message = f"`task: {name}` samples answers with a cache of keys and values, which {axis} splits"
            yield from view.at_each([f"parallel.{axis}"], message, "spread it by data, shard or tensor")
    prefix = has_prefix(view.value("tune.method"), deep=view.value("tune.deep"))
    if prefix and view.value("parallel.shard") != "none":
        message = f"`task: {name}` samples answers, and a prefix' encoder is not gathered for that"
        yield from view.at_each(["parallel.shard", "tune.method"], message, "write shard: none, or another method")
    if view.value("tune.dropout"):
        message = f"`task: {name}` learns from answers of the policy itself, and dropout changes the policy"
        yield from view.at_each(["tune.dropout"], message, "remove it")
    for key in ("data", "evaluate.data"):
        for number, source in enumerate(view.value(key)):
            if source.too_long == "split":
                message = "`too_long: split` would make prompts of parts of answers"
                yield from view.at_each([f"{key}[{number}].too_long"], message, "write cut or drop")
    if view.value("task") == name and view.value(f"{name}.max_tokens") >= (seq_len := _seq_len(view)):
        message = f"answers of {view.value(f'{name}.max_tokens')} tokens leave no room for a prompt in {seq_len} tokens"
        yield from view.at_each([f"{name}.max_tokens", "train.seq_len"], message, "raise train.seq_len")
    yield from _numbers(view, name)
    yield from _clips(view, name)
    yield from _reward_weights(view, name)
    yield from _kl(view, name, usual_kl, usual_place)


def _seq_len(view: View) -> int:
    from stoker.job.resolution.batch_triangle import seq_len_of

    view.value("train.seq_len")  # raises where it is invalid
    return seq_len_of(view.job)


def _reward_weights(view: View, name: str) -> Iterator[Problem]:
    rewards = view.value(f"{name}.rewards")
    for number, reward in enumerate(rewards) if isinstance(rewards, list) else ():
        if reward in rewards[:number]:
            message = f"the reward {reward} is given twice, and counts once"
            yield from view.at_each([f"{name}.rewards[{number}]"], message, f"remove it, or write {{{reward}: 2}}")
    for reward, weight in rewards.items() if isinstance(rewards, dict) else ():
        if weight == 0:
            message = f"the reward {reward} has a weight of 0, so it has no effect"
            yield from view.at_each([f"{name}.rewards"], message, "remove it, or write another weight")


def _clips(view: View, name: str) -> Iterator[Problem]:
    """Yields the problems of ranges that clip all ratios or none; see `_whole_steps`."""
    low, high = view.value(f"{name}.clip"), view.value(f"{name}.clip_high")
    for key, value in (("clip", low), ("clip_high", high)):
        if value == 0 and not view.is_recorded(f"{name}.{key}"):
            message = f"`{key}: 0` leaves the probability ratio no range"
            yield from view.at_each([f"{name}.{key}"], message, "remove it, or write a number above 0, such as 0.2")
    if low is not None and low >= 1 and not view.is_recorded(f"{name}.clip"):
        message = f"`clip: {low:g}` clips no probability ratio, as 1 - {low:g} is not above 0"
        yield from view.at_each([f"{name}.clip"], message, "write a number below 1, such as 0.2")


def _kl(view: View, name: str, usual_kl: float, usual_place: str) -> Iterator[Problem]:
    kl, place = view.value(f"{name}.kl"), view.value(f"{name}.kl_in")
    estimated = view.differs(f"{name}.kl_estimator")
    if (usual_kl if kl is None else kl) > 0:
        yield from _reference(view, name)
        if (place or usual_place) == "reward" and estimated:
            message = "`kl_estimator` is of the KL in the loss; a KL in the reward is estimated by k1"
            yield from view.at_each(
                [f"{name}.kl_estimator", f"{name}.kl_in"], message, "remove it, or write kl_in: loss"
            )
        return
    for key, chosen in (("kl_in", place not in (None, usual_place)), ("kl_estimator", estimated)):
        if chosen:
            message = f"`{key}` has no effect without a KL"
            yield from view.at_each([f"{name}.{key}", f"{name}.kl"], message, f"remove it, or write {name}.kl: 0.05")


def _numbers(view: View, name: str) -> Iterator[Problem]:
    yield from if_known(_whole_steps(view, name))
    yield from if_known(_equal_shares(view, name))


def if_known(problems: Iterator[Problem]) -> Iterator[Problem]:
    """Yields problems until they depend on a number that is not known yet."""
    from stoker.job.conflicts.conflict_view import CannotTellError

    with suppress(CannotTellError):
        yield from problems


def _whole_steps(view: View, name: str) -> Iterator[Problem]:
    """Yields the problem of a batch that spans rounds; the job.yaml of an earlier version's run may record one."""
    from stoker.job.conflicts.layout_conflicts import batch_of

    prompts, answers = view.value(f"{name}.prompts"), view.value(f"{name}.answers") or 1
    batch = batch_of(view)
    if prompts * answers % batch and not view.is_recorded("train.batch"):
        message = f"train.batch is {batch}, which does not divide the {prompts * answers} answers of an iteration"
        keys = ["train.batch", "train.micro_batch", f"{name}.prompts", f"{name}.answers"]
        yield from view.at_each(keys, message, f"write a divisor of {prompts} x {answers}")


def _equal_shares(view: View, name: str) -> Iterator[Problem]:
    """Yields the problem of processes with unequally many prompts; see `_whole_steps`."""
    from stoker.job.conflicts.layout_conflicts import data_of

    prompts, data = view.value(f"{name}.prompts"), data_of(view)
    if prompts % data and not view.is_recorded("parallel.data"):
        message = f"{prompts} prompts cannot be shared by {data} data-parallel processes"
        keys = [f"{name}.prompts", "parallel.data", "parallel.devices"]
        yield from view.at_each(keys, message, f"write a multiple of {data}")


def _reference(view: View, name: str) -> Iterator[Problem]:
    method = view.value("tune.method")
    if view.value("tune.modules_to_save"):
        message = "the reference is the model without its adapter, and modules trained whole have no other weights"
        yield from view.at_each([f"{name}.kl", "tune.modules_to_save"], message, f"write {name}.kl: 0")
    if method in ("prefix", "prompt", "p-tuning"):
        message = f"`tune: {method}` changes the rows themselves, so there is no reference for a KL"
        yield from view.at_each([f"{name}.kl", "tune.method"], message, f"write {name}.kl: 0, or take another method")
