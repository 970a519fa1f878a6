"""Rounding bounds of stored weights by type, and the check of stored tensors against them.

Shapes: O outputs, I inputs of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.errors import RunFailed

FP16_LEAST = 2.0**-25  # half of float16's smallest positive number
FP32, FP16, BF16 = 2.0**-24, 2.0**-11, 2.0**-8  # half a unit in the last place, relative to the number
NF4_GAP = 0.152  # half of nf4's widest gap, between -1 and -0.6962 (Dettmers et al., 2023, appendix E)
NF4_SCALE = 0.9 / 64  # a step of the 8-bit scales, which lie between 0.1 and 1 minus their mean
SLACK = 1.1  # the scales of a group are rounded too
GROUPS: dict[str, tuple[int | None, float, int]] = {
    # Weights that share a scale (None: a row), the largest rounding relative to the largest of them, and the largest
    # multiple of the scale. q4_0 and q5_0 have one step less on one side, so the largest rounding is a whole step
    # there. q4_1 and q5_1 also round the smallest weight to float16.
    "q8_0": (32, 0.5 / 127 + FP16, 127),
    "q5_1": (32, 1 / 31 + 3 * FP16, 32),
    "q5_0": (32, 1 / 16 + FP16, 16),
    "q4_1": (32, 1 / 15 + 3 * FP16, 16),
    "q4_0": (32, 1 / 8 + FP16, 8),
    "8bit": (None, 0.5 / 127, 1),
    "int8": (None, 0.5 / 127, 1),
    "int4": (32, 0.5 / 7.5, 1),
    "4bit": (64, NF4_GAP, 1),
}
SCALE = 0.03  # relative change of a tensor's scale in 4 bits; rounding to nf4 shrinks it by 0.01
ENOUGH = 1024  # weights needed to estimate the scale


def largest_rounding(weight: Tensor, form: str) -> Tensor:
    """Returns the largest change of each number of a tensor when it is stored, in the tensor's shape.

    Args:
        weight: float32.
        form: ``fp32``, ``fp32+1`` (stored as float32 after 1 was added), ``fp16``, ``bf16``, a quantised type of
            GGUF, or a form of ``model.quantise``.
    """
    size = weight.abs()
    if form == "fp32":
        return torch.zeros_like(size)
    if form == "fp32+1":
        return (size + 1) * FP32
    if form == "bf16":
        return size * BF16
    if form == "fp16":
        return size * FP16 + FP16_LEAST
    group, share, levels = GROUPS[form]
    most = _largest_of(size.flatten(1) if group is None else _grouped(size, group), size) * share * SLACK
    if form == "4bit":  # its scales are stored in 8 bits, in groups of 256
        most += _largest_of(_grouped(size, 64 * 256), size) * NF4_SCALE
    return most + FP16_LEAST * levels


def _grouped(size: Tensor, group: int) -> Tensor:
    return nn.functional.pad(size.flatten(), (0, -size.numel() % group)).view(-1, group)


def _largest_of(groups: Tensor, like: Tensor) -> Tensor:
    """Returns the largest number in the group of each element, in the shape of a tensor."""
    return groups.amax(-1, keepdim=True).expand_as(groups).flatten()[: like.numel()].view_as(like)


def check_stored(name: str, trained: Tensor, stored: Tensor, form: str) -> None:
    """Compares a stored tensor with the trained one.

    Raises:
        RunFailed: the difference exceeds the rounding of its form.
    """
    trained, stored = trained.float(), stored.to(trained.device).float()
    if trained.shape != stored.shape:
        raise RunFailed(f"the export differs: {name} is {tuple(stored.shape)}, trained {tuple(trained.shape)}")
    if not trained.numel():
        return
    beyond = (stored - trained).abs() - largest_rounding(trained, form)
    worst = int(beyond.argmax())
    if not bool(beyond.max() <= 0):  # NaN is not
        a, b = float(stored.flatten()[worst]), float(trained.flatten()[worst])
        raise RunFailed(
            f"the export differs: {name} holds {a:.6g} where {b:.6g} was trained, more than {form} rounds by"
        )
    grown = float((stored * trained).sum() / trained.square().sum().clamp(min=1e-30))
    if form in GROUPS and trained.numel() >= ENOUGH and abs(grown - 1) > SCALE:
        raise RunFailed(f"the export differs: {name} is {grown:.3f} times as large as trained")
