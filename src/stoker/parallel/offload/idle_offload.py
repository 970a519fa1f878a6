"""Offloads idle tensors: frees their device memory while they are not used (as in DeepSpeed-Chat: Yao et al., 2023).

Their bytes are copied to host memory and back into the same tensors, so that references to them and views of them
(in optimizers, sharded parameters, models) stay valid. Page-locked host memory is kept for the next time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stoker.parallel.offload.page_locked import host_memory_like
from stoker.parallel.shard_spec import local_shard


class IdleOffload:
    """Moves the bytes of tensors to the host and back.

    Args:
        tensors: returns the current tensors. Of sharded ones only this process' shard is moved; tensor subclasses,
            such as quantised weights, are not moved.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._held: list[tuple[Tensor, Tensor]] = []  # (bytes on the device, the same on the host)
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # host memory by size; locking it takes seconds

    def leave(self) -> None:
        """Moves the bytes to host memory; does nothing if they are there already."""
        if self._held:
            return
        found: dict[int, Tensor] = {}
        for tensor in self._tensors():
            own = local_shard(tensor).detach()
            if type(own) is Tensor and own.untyped_storage().size():
                bytes_ = torch.empty(0, dtype=torch.uint8, device=own.device).set_(own.untyped_storage())
                found[bytes_.data_ptr()] = bytes_
        for bytes_ in found.values():
            free = self._free[bytes_.numel()]
            host = free.pop() if free else host_memory_like(bytes_, self)
            self._held.append((bytes_, host.copy_(bytes_, non_blocking=True)))
        _wait_for(found.values())
        for bytes_ in found.values():
            bytes_.untyped_storage().resize_(0)

    def come_back(self) -> None:
        """Moves the bytes back."""
        for bytes_, host in self._held:
            bytes_.untyped_storage().resize_(host.numel())
            bytes_.copy_(host, non_blocking=True)
        _wait_for(bytes_ for bytes_, _ in self._held)
        for _, host in self._held:
            if _is_kept(host):
                self._free[host.numel()].append(host)
        self._held = []

    @contextmanager
    def away(self) -> Iterator[None]:
        """The bytes are on the host within the block."""
        self.leave()
        try:
            yield
        finally:
            self.come_back()

    @contextmanager
    def here(self) -> Iterator[None]:
        """The bytes are on the device within the block, and on the host afterwards."""
        self.come_back()
        try:
            yield
        finally:
            self.leave()


def _is_kept(host: Tensor) -> bool:
    """Returns whether host memory waits for its next use: page-locked one, which torch would not give back either."""
    return torch.cuda.is_available() and host.is_pinned()


def _wait_for(copied: Iterable[Tensor]) -> None:
    """Waits until copies from or to a GPU have been made."""
    if any(tensor.is_cuda for tensor in copied):
        torch.cuda.synchronize()
