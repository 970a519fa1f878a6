"""Collective steps of a run's processes: an error of one is raised on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from stoker.errors import RunFailed

T = TypeVar("T")


def rank() -> int:
    """Returns this process' rank; 0 in a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def run_on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Runs ``work`` on every process and returns all results, by rank. A collective.

    Raises:
        Exception: the error of the first process on which ``work`` failed, on every process.
    """
    if not dist.is_initialized():
        return [work()]
    value, mine = None, None
    try:
        value = work()
    except Exception as error:
        mine = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (value, _sendable(mine)))
    for at, (_, failed) in enumerate(outcomes):
        if failed is not None:
            raise mine if at == rank() and mine is not None else failed
    return [value for value, _ in outcomes]


def by_first(work: Callable[[], T]) -> T:
    """Runs ``work`` on rank 0 and returns its result, or raises its error, on every process. A collective."""
    value: T = run_on_all_ranks(lambda: work() if rank() == 0 else None)[0]  # type: ignore[assignment]
    return value


def _sendable(error: Exception | None) -> Exception | None:
    """Returns the error, or its message as `RunFailed` where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RunFailed(f"{type(error).__name__}: {error}")
    return error
