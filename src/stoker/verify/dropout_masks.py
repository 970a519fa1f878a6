"""Dropout masks of the processes of a layout: different where data differ, equal where the same values are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.job.layout import Layout


@dataclass(frozen=True)
class Draw:
    """A dropout mask that was drawn.

    Attributes:
        step: 0 during evaluation.
        state: digest of the generator's state before the draw; equal states give equal masks.
        content: digest of the tensor that dropout is applied to.
    """

    step: int
    rate: float
    state: bytes
    content: bytes


@dataclass
class Draws:
    """The masks that this process has drawn."""

    step: int = 0
    made: list[Draw] = field(default_factory=list)

    def add(self, x: Tensor, rate: float) -> None:
        on_gpu = x.device.type == "cuda"
        state = torch.cuda.get_rng_state(x.device) if on_gpu else torch.get_rng_state()
        content = x.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        self.made.append(Draw(self.step, rate, _digest(state.numpy()), _digest(content)))


@contextmanager
def record_dropout_masks() -> Iterator[Draws]:
    """Records every mask that dropout draws, in the backward pass too."""
    draws = Draws()
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p:
            draws.add(input, p)
        return dropout(input, p, training, inplace)

    def attended(*arguments: Any, **options: Any) -> Tensor:
        if rate := options.get("dropout_p", 0.0):
            draws.add(options["query"] if "query" in options else arguments[0], rate)
        return attention(*arguments, **options)

    try:
        F.dropout, F.scaled_dot_product_attention = dropped, attended
        yield draws
    finally:
        F.dropout, F.scaled_dot_product_attention = dropout, attention


def problem_of(ranks: Sequence[Sequence[Draw]], layout: Layout, rates: frozenset[float] | None) -> str | None:
    """Returns the problem of the masks that a layout's processes drew; None if there is none.

    Args:
        ranks: the masks of each process, in the order of its steps.
        rates: the dropout rates of the job; None if they are not known.
    """
    found = {draw.rate for draws in ranks for draw in draws}
    if not found:
        return "nothing is dropped, and the job drops"
    if rates is not None and found - rates:
        return f"{max(found - rates):g} of something is dropped, and the job drops {', '.join(map(str, sorted(rates)))}"
    if any(draw.step == 0 for draws in ranks for draw in draws):
        return "something is dropped while the model is evaluated"
    return _numbers_drawn_twice(ranks, layout) or _problem_of_peers(ranks, layout)


def _numbers_drawn_twice(ranks: Sequence[Sequence[Draw]], layout: Layout) -> str | None:
    """Describes random numbers that were drawn in two steps, or by two processes that do not share each matrix."""
    states = [{(draw.step, draw.state) for draw in draws} for draws in ranks]
    for at, own in enumerate(states):
        if len({state for _, state in own}) < len(own):
            return f"process {at} draws the same numbers in two steps"
        for other in range(at):
            apart = other // layout.tensor != at // layout.tensor  # ranks count tensor processes fastest
            if apart and (same := own & states[other]):
                return f"the processes {other} and {at} draw the same numbers in step {min(same)[0]}"
    return None


def _problem_of_peers(ranks: Sequence[Sequence[Draw]], layout: Layout) -> str | None:
    for first in range(0, len(ranks), layout.tensor):
        for at in range(first + 1, first + layout.tensor):
            if why := _between_peers(ranks[first], ranks[at], layout):
                return f"the processes {first} and {at}, which share each matrix, {why}"
    return None


def _between_peers(draws: Sequence[Draw], others: Sequence[Draw], layout: Layout) -> str | None:
    if len(draws) != len(others):
        return f"draw {len(draws)} and {len(others)} masks"
    for one, other in zip(draws, others, strict=True):
        if one.content == other.content and one.state != other.state and not layout.sequence:
            return f"drop other parts of the same tensor in step {one.step}"
        if one.content != other.content and one.state == other.state:
            return f"drop the same parts of different tensors in step {one.step}"
    return None


def _digest(content: Any) -> bytes:
    return blake2b(memoryview(content), digest_size=16).digest()
