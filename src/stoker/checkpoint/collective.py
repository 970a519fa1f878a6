"""Steps that all processes of a run take together: an error of one becomes the error of all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from stoker.errors import RunFailed

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: Exception | None = None


def rank() -> int:
    """This process' rank; 0 where there is one process only."""
    return dist.get_rank() if dist.is_initialized() else 0


def together(work: Callable[[], T]) -> list[T]:
    """Every process does its part; returns what each gave, by rank, once all are done. A collective.

    Raises:
        Exception: on every process, what ``work`` raised on the first process that it failed on.
    """
    if not dist.is_initialized():
        return [work()]
    try:
        mine = _Outcome(value=work())
    except Exception as error:
        mine = _Outcome(error=error)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _Outcome(mine.value, _sendable(mine.error)))
    for at, outcome in enumerate(outcomes):
        if outcome.error is not None:
            raise mine.error if at == rank() and mine.error is not None else outcome.error
    return [outcome.value for outcome in outcomes]


def by_first(work: Callable[[], T]) -> T:
    """Rank 0 does it for all; every process gets what it gave, or raised. A collective."""
    value: T = together(lambda: work() if rank() == 0 else None)[0]  # type: ignore[assignment]
    return value


def _sendable(error: Exception | None) -> Exception | None:
    """The error, or its words where other processes could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RunFailed(f"{type(error).__name__}: {error}")
    return error
