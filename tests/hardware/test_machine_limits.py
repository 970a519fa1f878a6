"""Errors of the machine are recognised, whichever library raises them."""

from __future__ import annotations

import errno
from traceback import StackSummary

import pytest
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from stoker.hardware.machine_limits import SPACE, machine_problem


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
    ],
)
def test_a_full_disk_is_recognised_in_the_error_of_any_library(error: Exception) -> None:
    problem = machine_problem(error)
    assert problem is not None
    assert problem.message == SPACE


def test_a_damaged_file_is_no_problem_of_the_machine() -> None:
    assert machine_problem(SafetensorError("Error while deserializing header: header too large")) is None


def test_a_circular_chain_of_errors_ends() -> None:
    inner, outer = ValueError("not a plan"), KeyError("wrapped")
    inner.__context__, outer.__cause__ = outer, inner
    assert machine_problem(inner) is None
    outer.__context__ = OSError(errno.ENOSPC, "No space left on device")
    problem = machine_problem(inner)
    assert problem is not None
    assert problem.message == SPACE


@pytest.mark.parametrize("failures", [["not a dict"], {"request": 404}, {"request": ()}, {"request": ("text", None)}])
def test_an_error_of_another_library_may_have_failures_of_its_own(failures: object) -> None:
    error = ValueError("a request failed")
    error.failures = failures  # type: ignore[attr-defined]
    assert machine_problem(error) is None
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert machine_problem(error) is not None


def test_a_full_disk_is_recognised_in_an_error_that_a_checkpoint_wraps() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    problem = machine_problem(CheckpointException("save", {1: (full, StackSummary())}))
    assert problem is not None
    assert problem.message == SPACE
