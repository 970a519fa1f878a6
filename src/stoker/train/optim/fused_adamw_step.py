"""A step of AdamW with low-precision moments as one compiled function: a kernel or two for each piece of a parameter.

Launched one by one, the operators of a step (about 40 with moments in 8 bits) read and write all of its numbers each.

Shapes: R rows of `ROW` consecutive entries, C = `ROW`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stoker.hardware.process_device import on_device
from stoker.parallel.compile import has_compiler
from stoker.train.optim.held_moments import MOMENTS, Codebooks, HeldMoments

ROW = 64  # a static size, so that the compiler knows that rows are aligned; a block of moments in 8 bits
TRITON_FROM = (7, 0)  # compute capability of the first GPUs that Triton supports: Volta
LEAST = 1 << 18  # entries of a piece: smaller ones are stepped together, since a call takes the host as long


@cache
def compiles_steps(kind: str) -> bool:
    """Returns whether steps are compiled for this kind of device."""
    return kind == "cuda" and torch.cuda.get_device_capability() >= TRITON_FROM and has_compiler()


def fits(weights: Tensor, held: Mapping[str, Tensor]) -> bool:
    """Returns whether a piece of a parameter, with its stored moments, can be stepped by `fused_step`."""
    size = weights.numel()
    return (
        size >= LEAST
        and size % ROW == 0
        and weights.dtype == torch.float32
        and all(tensor.is_contiguous() for tensor in (weights, *held.values()))
        and compiles_steps(weights.device.type)
    )


def step_numbers(group: Mapping[str, Any], step: int, device: torch.device) -> Tensor:
    """Returns what `fused_step` needs of a parameter group in its ``step``-th step, from 0 on.

    They are in a tensor, so that other learning rates and steps need no other compilation.
    """
    lr, (beta1, beta2) = group["lr"], group["betas"]
    decay, rate = 1 - lr * group["weight_decay"], lr / (1 - beta1 ** (step + 1))
    unbias = math.sqrt(1 - beta2 ** (step + 1))
    numbers = [decay, rate, unbias, group["eps"], beta1, 1 - beta1, beta2, 1 - beta2]
    return on_device(torch.tensor(numbers, dtype=torch.float32), device)


def fused_step(
    moments: HeldMoments,
    weights: Tensor,
    gradient: Tensor,
    held: Mapping[str, Tensor],
    numbers: Tensor,
    noise: Sequence[Tensor] | None,
    bad: Tensor | None,
) -> None:
    """Updates a piece of a parameter and its stored moments.

    Args:
        numbers: see `step_numbers`.
        noise: see `HeldMoments.write`.
        bad: 1 if nothing is to change; 0-d.
    """
    weights_RC, gradient_RC = weights.view(-1, ROW), gradient.contiguous().view(-1, ROW)
    entries = weights.numel()
    rows = {name: x.view(-1, ROW) if x.numel() == entries else x.view(-1) for name, x in held.items()}
    bits = None if noise is None else [each.view(-1, ROW) for each in noise]
    for tensor in (weights_RC, gradient_RC, *rows.values(), *(bits or ())):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    codebooks = moments.codebooks(weights.device, weights.dtype)
    _compiled()(moments, weights_RC, gradient_RC, rows, numbers, bits, bad, codebooks)


@cache
def _compiled() -> Callable[..., None]:
    return torch.compile(step_of_rows, fullgraph=True)


def step_of_rows(
    moments: HeldMoments,
    weights_RC: Tensor,
    gradient_RC: Tensor,
    held: Mapping[str, Tensor],
    numbers: Tensor,
    noise: Sequence[Tensor] | None,
    bad: Tensor | None,
    codebooks: Codebooks,
) -> None:
    """The operators of `fused_step`, in the order of torch's fused AdamW."""
    decay, rate, unbias, eps, beta1, rest1, beta2, rest2 = numbers.unbind()
    before = [moments.read(name, [held], weights_RC.dtype, codebooks).view_as(weights_RC) for name in MOMENTS]
    first_RC = beta1 * before[0] + rest1 * gradient_RC
    second_RC = beta2 * before[1] + rest2 * gradient_RC * gradient_RC
    stepped_RC = weights_RC * decay - rate * first_RC / (second_RC.sqrt() / unbias + eps)
    after = [first_RC, second_RC]
    if bad is not None:
        stepped_RC = torch.where(bad > 0, weights_RC, stepped_RC)
        after = [torch.where(bad > 0, old, new) for old, new in zip(before, after, strict=True)]
    weights_RC.copy_(stepped_RC)
    exact = dict(zip(MOMENTS, after, strict=True))
    moments.write([held], exact, noise, bad, codebooks)
