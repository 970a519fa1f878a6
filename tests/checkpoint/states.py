"""States to be saved, different at every step, and what is asked of them afterwards."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import torch

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.state import State


def state(step: int) -> State:
    """A small state of one process: all kinds of tensors."""
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "model/a": torch.randn(40, 30, generator=generator),
        "model/b": torch.randn(7, generator=generator).to(torch.bfloat16),
        "optimizer/a/step": torch.tensor(float(step)),
        "buffer/n": torch.tensor(step),
        "model/empty": torch.zeros(0, 3),
    }
    return State(step, tensors, {"progress": {"samples": 8 * step, "best_loss": 0.1 + step}, "scaler": {}})


def assert_saved(store: Store, step: int) -> None:
    """A checkpoint of `state` is there, to the bit."""
    loaded, saved = store.load(step), state(step)
    assert loaded.step == step and loaded.numbers == saved.numbers
    assert loaded.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype and torch.equal(loaded.tensors[name], tensor), name


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def wait_for_writers(store: Store, seconds: float = 60.0) -> None:
    """Waits for the background writers, whose processes may have ended."""
    deadline = time.monotonic() + seconds
    while store.storage.pending():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_end(process: int, seconds: float = 60.0) -> None:
    """Waits until a process that another one started has ended."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)
