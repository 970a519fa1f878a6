"""Kernels of linear attention on a GPU: flash-linear-attention computes all documents of a packed row in one call.

Where the package can be imported, transformers' layers call it for tensors of any device, and would fail on a CPU.
Their convolution, which is a kernel only with another package, does not know documents.

Shapes: T tokens, C channels, W width of the convolution.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

INSTALL = "pip install 'stoker[linear]'"
DEVICES = ("cuda",)  # torch's name of AMD's GPUs too
# transformers' functions, and the package whose kernels each calls where that can be imported.
RULES = {"torch_chunk_gated_delta_rule": "fla", "torch_recurrent_gated_delta_rule": "fla"}
CONVOLUTIONS = {"causal_conv1d_fn": "causal_conv1d", "causal_conv1d_update": "causal_conv1d"}


@cache
def has_kernels() -> bool:
    """Returns whether flash-linear-attention can be imported, with its Triton."""
    return _can_import("fla.ops.gated_delta_rule")


def takes_kernels(x: Tensor) -> bool:
    """Returns whether kernels compute a tensor: on a GPU, and not in float64, which they do not support."""
    return _is_for_kernels(x) and has_kernels()


def describe_kernels(device: torch.device) -> str:
    """Returns how linear attention is computed on a GPU, and what its kernels need; empty on other devices."""
    if device.type not in DEVICES:
        return ""
    if has_kernels():
        return "flash-linear-attention, all documents of a row in one call"
    return f"in PyTorch, document by document, which is slow on a GPU: {INSTALL}"


def choose_by_device(layer: nn.Module) -> None:
    """Has transformers' code of a layer call kernels for tensors of a GPU, and its own functions for others."""
    _choose_by_device(type(layer).__module__)


@cache  # once for each module of transformers
def _choose_by_device(name: str) -> None:
    code: Any = sys.modules[name]
    for function, package in (RULES | CONVOLUTIONS).items():
        setattr(code, function, _by_device(getattr(code, function), package))
    code.causal_conv1d_fn = _by_document(code.causal_conv1d_fn)


def _by_device(kernel: Callable[..., Any], package: str) -> Callable[..., Any]:
    plain = unwrap(kernel)  # transformers' own function

    @wraps(plain)
    def chosen(x: Tensor, *arguments: Any, **options: Any) -> Any:
        known = _is_for_kernels(x) and (has_kernels() if package == "fla" else _can_import(package))
        return (kernel if known else plain)(x, *arguments, **options)

    return chosen


def _is_for_kernels(x: Tensor) -> bool:
    return x.device.type in DEVICES and x.dtype != torch.float64


@cache
def _can_import(name: str) -> bool:
    try:
        import_module(name)
    except Exception:  # as transformers, which takes any for a missing package
        return False
    return True


def _by_document(alone: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(alone)
    def convolution(
        x_1CT: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None = None,
        activation: str | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if cu_seq_lens_q is None:
            return alone(x_1CT, weight_CW, bias_C, activation=activation, **options)
        bounds = {"cu_seqlens": cu_seq_lens_q, "cu_seqlens_cpu": cu_seqlens_cpu}
        convolve = import_module("fla.modules.conv").causal_conv1d
        out_1TC, _ = convolve(x_1CT.transpose(1, 2), weight_CW, bias_C, activation=activation, **bounds)
        return out_1TC.transpose(1, 2)

    return convolution
