"""Activations in host memory between the forward and the backward pass (as in Megatron-LM and torchtune).

What a block saves for its backward pass is copied to the host while the next block computes, and comes back while the
next block's backward pass computes. Streams wait for each other, and the host never waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from stoker.errors import CannotRun, Problem, UserError
from stoker.models.blocks import blocks_of
from stoker.parallel.offload.copy_stream import Copies, copies_of
from stoker.parallel.shard_spec import local_shard

LEAST_BYTES = 1 << 20  # of a storage that is copied
PIECE_BYTES = 1 << 25  # page-locked memory is reserved in powers of two, so storages are copied in pieces
CASTS = ("TBackward0", "ToCopyBackward0")  # operations between a weight and its copy in the type of products
Pair = tuple[Tensor, Tensor]


def offload_activations(
    model: nn.Module, device: torch.device, copies: Callable[[torch.device], Copies] = copies_of
) -> int:
    """Offloads what all blocks but the last one save for the backward pass; returns the number of blocks.

    Weights, buffers, and what a block takes that needs no gradient, such as masks, stay on the device.

    Args:
        device: on which the blocks compute.
        copies: makes the copies from a device, and those to it; by default on streams of their own on a GPU.

    Raises:
        UserError: the model has no list of blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError(
            "parallel.offload: the model has no list of blocks, so activations cannot be offloaded; write none"
        )
    passes = _Passes(device, copies)
    for block in blocks:
        block.forward = partial(passes.forward, block, block.forward, block is blocks[0], block is blocks[-1])
    return len(blocks)


class _Passes:
    """The forward passes of the blocks, the copies of what they save, and the host memory for it."""

    def __init__(self, device: torch.device, copies: Callable[[torch.device], Copies]) -> None:
        self.device = device
        self.down, self.up = _Lane(copies(device)), _Lane(copies(device))
        self.memory = _HostMemory(pinned=device.type == "cuda")
        self._latest: _Saved | None = None

    def forward(
        self, block: nn.Module, forward: Callable[..., Any], first: bool, last: bool, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a block's forward pass; what it saves leaves the device afterwards."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        inputs = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.requires_grad)
        stay = {*map(_address, (*block.parameters(), *block.buffers(), *inputs))}
        saved = _Saved(self, None if first else self._latest, stay=stay)
        with saved_tensors_hooks(partial(saved.pack, keep=last), saved.unpack):
            result = forward(*args, **kwargs)
        self._latest = None if last else saved
        saved.leave()
        return result


class _Lane:
    """Copies in one direction, whose sources and targets are kept until the device waits for them."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._pairs: list[Pair] = []

    def begin(self, pairs: Iterable[Pair]) -> None:
        """Begins copies after all work so far; earlier ones precede further work."""
        self.finish()
        self._pairs = list(pairs)
        if self._pairs:
            self._copies.follow_device()
            self._copies.begin(self._pairs)

    def finish(self) -> None:
        """Makes further work of the device wait for the copies."""
        if self._pairs:
            self._copies.precede_device()
            self._pairs = []


class _HostMemory:
    """Buffers on the host by size, reused after their copies, as the device orders them."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, size: int) -> list[Tensor]:
        """Returns buffers for the pieces of this number of bytes."""
        return [self._take(min(PIECE_BYTES, size - start)) for start in range(0, size, PIECE_BYTES)]

    def give(self, buffers: Iterable[Tensor]) -> None:
        """Takes buffers back that all further work of the device may overwrite."""
        for buffer in buffers:
            self._free[buffer.numel()].append(buffer)

    def _take(self, size: int) -> Tensor:
        rounded = 1 << (size - 1).bit_length()
        if self._free[rounded]:
            return self._free[rounded].pop()
        try:
            return torch.empty(rounded, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            message = f"the host has no more page-locked memory for `offload: activations`: {error}"
            raise CannotRun(Problem(message, "also write `recompute: full`, or lower train.micro_batch")) from error


class _Bytes:
    """The bytes of a storage, on the device or on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.device.set_(tensor.untyped_storage())
        self.size = self.device.numel()
        self.host: list[Tensor] = []


class _View:
    """A tensor in the bytes of a storage."""

    def __init__(self, tensor: Tensor, held: _Bytes) -> None:
        self._held, self._dtype = held, tensor.dtype
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        assert self._held.device is not None
        empty = torch.empty(0, dtype=self._dtype, device=self._held.device.device)
        return empty.set_(self._held.device.untyped_storage(), *self._place)


class _Saved:
    """What one forward pass of a block saves.

    Args:
        previous: of the block before, which comes back during this block's backward pass.
        stay: addresses of storages that are not offloaded.
    """

    def __init__(self, passes: _Passes, previous: _Saved | None, *, stay: set[int]) -> None:
        self._passes, self._previous, self._stay = passes, previous, stay
        self._bytes: dict[int, _Bytes] = {}  # by address
        self._back = self._begun = False

    def pack(self, tensor: Tensor, *, keep: bool) -> Tensor | _View:
        if keep or type(tensor) is not Tensor or tensor.device.type != self._passes.device.type:
            return tensor
        address = _address(tensor)
        if tensor.untyped_storage().nbytes() < LEAST_BYTES or not self._stay.isdisjoint((address, _weight(tensor))):
            return tensor
        if address not in self._bytes:
            self._bytes[address] = _Bytes(tensor)
        return _View(tensor, self._bytes[address])

    def unpack(self, packed: Tensor | _View) -> Tensor:
        if not self._back:
            self._come_back()
        return packed if isinstance(packed, Tensor) else packed.tensor()

    def leave(self) -> None:
        """Begins the copies to the host, and frees what the block before has saved."""
        self._passes.down.begin(self._to_host())

    def _to_host(self) -> Iterator[Pair]:
        for held in self._bytes.values():
            assert held.device is not None
            held.host = self._passes.memory.take(held.size)
            yield from _pieces(held.host, held.device)
            held.device = None

    def _begin_back(self) -> None:
        if not self._begun:
            self._begun = True
            self._passes.up.begin((piece, host) for host, piece in self._from_host())

    def _from_host(self) -> Iterator[Pair]:
        for held in self._bytes.values():
            held.device = torch.empty(held.size, dtype=torch.uint8, device=self._passes.device)
            yield from _pieces(held.host, held.device)

    def _come_back(self) -> None:
        """Makes the backward pass wait for the copies back, and begins those of the block before."""
        self._back = True
        self._begin_back()
        self._passes.up.finish()
        for held in self._bytes.values():
            self._passes.memory.give(held.host)
        self._bytes = {}  # each is freed with the last tensor in it
        if self._previous is not None:
            self._previous._begin_back()
            self._previous = None


def _pieces(buffers: Sequence[Tensor], whole: Tensor) -> Iterator[Pair]:
    """Yields (host, device) memory of each piece."""
    for buffer, piece in zip(buffers, whole.split(PIECE_BYTES), strict=True):
        yield buffer[: piece.numel()], piece


def _address(tensor: Tensor) -> int:
    return local_shard(tensor).untyped_storage().data_ptr()


def _weight(tensor: Tensor) -> int | None:
    """Returns the address of the parameter that a tensor is a cast copy of, as autocast keeps them; None if of none."""
    node = tensor.grad_fn
    while node is not None and node.name() in CASTS:
        node = node.next_functions[0][0]
    variable = getattr(node, "variable", None)
    return None if variable is None else _address(variable)
