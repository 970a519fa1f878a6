"""Deterministic kernels: ``train.deterministic``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stoker.errors import CannotRun, Problem

_memory: Any = torch.utils.deterministic  # its setting is an attribute that type checkers do not see
WITHOUT = "does not have a deterministic implementation"  # part of torch's error message


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Restricts torch to kernels with bitwise reproducible results, where ``enabled``.

    Memory that is allocated without a value is not filled, as all of it is written before it is read: torch would run
    one more kernel for each ``torch.empty``.

    Raises:
        CannotRun: an operation has no such kernel.
    """
    if not enabled:
        yield
        return
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = _memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if WITHOUT not in str(error):
            raise
        operation = str(error).partition(WITHOUT)[0].strip()
        problem = Problem(f"train.deterministic: {operation} has no deterministic kernel here", "remove the key")
        raise CannotRun(problem) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        _memory.fill_uninitialized_memory = filled
