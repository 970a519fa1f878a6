"""Deterministic kernels: ``train.deterministic``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stoker.errors import CannotRun, Problem

WITHOUT = "does not have a deterministic implementation"  # part of torch's error message


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Restricts torch to kernels with bitwise reproducible results, where ``enabled``.

    Raises:
        CannotRun: an operation has no such kernel.
    """
    if not enabled:
        yield
        return
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
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
