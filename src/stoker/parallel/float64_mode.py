"""Arithmetic without rounding to float32: ``train.precision: fp64``.

Modelling code computes norms, softmaxes and rotary angles in float32 whatever the dtype of its weights. Two layouts of
a model sum the same numbers in a different order; a difference of 1e-16 before such a rounding can become 1e-7. Within
`in_float64` every request for float32 gives float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stoker.hardware.process_device import Device

_GROUPED = (torch._grouped_mm, torch.nn.functional.grouped_mm)
_BITS = (Tensor.view, torch.frombuffer, torch.from_file)  # here the type is that of stored bytes


class _Float64(TorchFunctionMode):
    """Replaces float32 by float64 in the arguments of torch's functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            return args[0].double()
        if func in _GROUPED and args[0].dtype == torch.float64:
            return _grouped_product(*args, **kwargs)
        if func in _BITS:
            return func(*args, **kwargs)
        if any(argument is torch.float32 for argument in args):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def arithmetic_of(device: Device) -> AbstractContextManager[None]:
    """Returns the context for all computation on a device: `in_float64` if its precision is fp64."""
    return in_float64() if device.precision == "fp64" else nullcontext()


@contextmanager
def in_float64() -> Iterator[None]:
    """Replaces float32 by float64 within the block, also in the backward pass and as the default type.

    Existing float32 tensors do not change.
    """
    before = torch.get_default_dtype()
    engine = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        # Tensor.backward is itself a function of torch, which disables the mode; recompute needs it.
        with _Float64():
            return engine(*args, **kwargs)

    torch.set_default_dtype(torch.float64)
    torch.autograd._engine_run_backward = run_backward
    try:
        with _Float64():
            yield
    finally:
        torch.autograd._engine_run_backward = engine
        torch.set_default_dtype(before)


def _grouped_product(x: Tensor, weights: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """Rows offs[i-1] .. offs[i] of ``x`` times ``weights[i]``: torch's own exists in bfloat16 and float32 only.

    Args:
        x: shape (rows, inputs).
        weights: shape (groups, inputs, outputs).
        offs: the end of each group's rows, shape (groups,).
    """
    ends = offs.tolist()
    parts = [x[start:end] @ weights[i] for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    # torch's own leaves rows after the last group uninitialised.
    rest = x.new_full((x.shape[0] - ends[-1], weights.shape[-1]), torch.nan)
    return torch.cat([*parts, rest])
