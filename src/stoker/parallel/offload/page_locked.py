"""Page-locked memory of the host, which a GPU reads and writes by itself, beside other work."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from stoker.parallel.shard_spec import local_shard

LEAST_BYTES = 1 << 25  # of a tensor that malloc always gives pages of its own


def host_memory_like(tensor: Tensor, owner: object) -> Tensor:
    """Returns memory on the host for a copy of a tensor; if that is on a GPU, see `page_locked_like`."""
    if tensor.is_cuda:
        return page_locked_like(tensor, owner)
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


def page_locked_like(tensor: Tensor, owner: object) -> Tensor:
    """Returns page-locked memory on the host for a copy of a tensor, which stays locked while ``owner`` lives.

    torch reserves such memory in powers of two, up to twice of what is needed, so large tensors are locked afterwards.
    """
    if local_shard(tensor).nbytes >= LEAST_BYTES:
        memory = torch.empty_like(tensor, device="cpu", requires_grad=False)
        if (unlock := lock_pages(local_shard(memory))) is not None:
            weakref.finalize(owner, unlock).atexit = False
            return memory
    return torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)


def lock_pages(memory: Tensor) -> Callable[[], None] | None:
    """Page-locks memory of the host; returns what unlocks it, or None if the driver refuses."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return partial(_unlock, memory.data_ptr())
    with suppress(RuntimeError):  # the next operator would report the error, so this one takes it
        torch.zeros(1, device="cuda")
    return None


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
