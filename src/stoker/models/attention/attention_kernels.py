"""Chooses the kernels of packed attention on this process' GPU: the fastest of those that agree with torch's own.

torch's variable-length attention is FlashAttention 2. Newer GPUs have faster kernels: FlashAttention 3 and 4, which
torch calls where they are installed, and cuDNN's, for documents of one length. They are measured once, with the heads
of the model, in both passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from transformers import PreTrainedConfig

from stoker.hardware.process_device import is_nvidia
from stoker.models.attention.attention_scores import AttentionScores
from stoker.models.attention.collate import Segment
from stoker.models.attention.even_rows import even_rows
from stoker.models.attention.varlen_attention import supports, varlen_attention
from stoker.models.attention.varlen_index import QuerySpan, VarlenIndex, varlen_index

INSTALLED = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}  # torch's name: module
FASTER_FROM = (9, 0)  # compute capability of the first GPUs with faster kernels: Hopper
TOKENS = 16384  # measured at most, unless a document is longer
TOLERANCE = 2e-2  # of outputs and gradients, relative to the largest: they are rounded to 16 bits
GAIN = 1.05  # a kernel is used if it is faster by this factor
ROUNDS = 5


@dataclass(frozen=True)
class Heads:
    """The query and key-value heads of an attention layer on one process, and their size."""

    query: int
    key_value: int
    size: int


@dataclass(frozen=True)
class _Kernel:
    """A kernel, and how it is put in use and out of it."""

    name: str
    use: Callable[[], None]
    undo: Callable[[], None]


@dataclass(frozen=True)
class _Measured:
    """Output and gradients of an attention layer, and the seconds of both passes."""

    values: Sequence[Tensor]
    seconds: float


def heads_of(config: PreTrainedConfig, tensor: int) -> Heads | None:
    """Returns the heads on each of ``tensor`` processes; None if the configuration does not state them."""
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):  # the first layers' heads (Gemma 4's full attention has others)
        text = text.per_layer_config[0]
    query, width = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    if not query or not width:
        return None
    key_value = getattr(text, "num_key_value_heads", None) or query
    return Heads(query // tensor, max(1, key_value // tensor), getattr(text, "head_dim", None) or width // query)


def choose_kernels(heads: Heads, length: int, dtype: torch.dtype, device: torch.device) -> str:
    """Puts the fastest kernels in use for documents of ``length`` tokens.

    Returns:
        What was measured; empty if torch's own is the only kernel.
    """
    if not has_faster(device):
        return ""
    inputs = _inputs(heads, length, dtype, device)
    if not supports(_index(inputs, length), inputs[0], inputs[2]):
        return ""
    own = best = _measure(inputs, length)
    lines = []
    for kernel in _kernels():
        found = _try(kernel, inputs, length, own)
        if isinstance(found, str):
            problem = found
        elif found.seconds * GAIN > best.seconds:
            problem = "not faster"
        else:
            lines.append(f"{kernel.name}, {own.seconds / found.seconds:.2f} times as fast as FlashAttention 2")
            best = found
            continue
        kernel.undo()
        lines.append(f"{kernel.name} is not used ({problem})")
    return "; ".join(lines)


def has_faster(device: torch.device) -> bool:
    """Returns whether there are faster kernels than torch's own for this device."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device) >= FASTER_FROM


def _kernels() -> Iterator[_Kernel]:
    for name, module in INSTALLED.items():
        if _is_installed(module):
            use, before = partial(activate_flash_attention_impl, name), current_flash_attention_impl()
            undo = partial(activate_flash_attention_impl, before) if before else _restore
            yield _Kernel(name.replace("FA", "FlashAttention "), use, undo)
    yield _Kernel("cuDNN for documents of one length", even_rows.enable, even_rows.disable)


def _restore() -> None:
    restore_flash_attention_impl(_raise_warn=False)  # a kernel that could not be put in use is undone, too


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not
        return False


def _try(kernel: _Kernel, inputs: Sequence[Tensor], length: int, own: _Measured) -> _Measured | str:
    """Puts a kernel in use and measures it; returns the problem where it fails or differs from torch's own."""
    try:
        kernel.use()
        found = _measure(inputs, length)
    except Exception as error:  # another project's code, perhaps compiled only now
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if not all(_distance(a, b) <= TOLERANCE for a, b in zip(found.values, own.values, strict=True)):
        return "other values"
    return found


def _measure(inputs: Sequence[Tensor], length: int) -> _Measured:
    """Measures both passes, by the fastest of several rounds."""
    query, key, value = inputs
    index, device = _index(inputs, length), query.device
    seconds = []
    for _ in range(ROUNDS):
        _wait(device)
        begin = time.perf_counter()
        out = varlen_attention(index, query, key, value, AttentionScores())
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return _Measured((out.detach(), *gradients), min(seconds))


def _inputs(heads: Heads, length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns random queries, keys and values of a row, of shapes (1, heads, tokens, size)."""
    tokens = max(1, TOKENS // length) * length
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(1, tokens, count, heads.size, dtype=dtype, device=device, generator=generator)
        .transpose(1, 2)
        .requires_grad_()
        for count in (heads.query, heads.key_value, heads.key_value)
    ]


def _index(inputs: Sequence[Tensor], length: int) -> VarlenIndex:
    documents = inputs[0].shape[2] // length
    segments = [Segment(i * length, length) for i in range(documents)]
    return varlen_index(segments, [QuerySpan(i, 0, length) for i in range(documents)], inputs[0].device)


def _distance(given: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest expected value."""
    return float((given - expected).abs().max() / expected.abs().max())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
