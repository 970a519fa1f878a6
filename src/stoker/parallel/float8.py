"""Matrix products in 8-bit floating point, by torchao: ``train.float8`` (Micikevicius et al., 2022, arXiv:2209.05433).

Weights stay in 16 or 32 bits; both factors of each product, in both passes, are scaled and rounded for it.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

import torch
from torch import nn

from stoker.errors import CannotRun, Problem, UserError
from stoker.hardware.process_device import is_nvidia
from stoker.models.blocks import blocks_of
from stoker.models.split_fused import Parts

Float8 = Literal["none", "tensorwise", "rowwise"]
CAPABLE = {"tensorwise": (8, 9), "rowwise": (9, 0)}  # NVIDIA's compute capability with such products
STEP = 16  # of a product's sizes
ROUTERS = ("gate", "router")  # whose few outputs select experts: they are not converted


def float8_linears(model: nn.Module, recipe: Float8, device: torch.device) -> None:
    """Converts the linear layers of the blocks to float8 products, after their split over processes.

    Layers whose sizes are not multiples of 16, and those of which a process computes only some outputs, are not
    converted. A CPU emulates the rounding and is slower with it.

    Args:
        recipe: a scale for each tensor, or for each row of a factor.
        device: on which it will compute.

    Raises:
        CannotRun: the device has no such products.
        UserError: torchao is not installed, or the model has no such layer.
    """
    if recipe == "none":
        return
    _check(recipe, device)
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=device.type == "cpu")
    products = Float8Linear(STEP, STEP, bias=False, config=config).linear_mm_config
    # The product of weight gradients sums over tokens, of which there are any number; the others over a layer's sizes.
    products = products._replace(grad_weight=products.grad_weight._replace(pad_inner_dim=True))
    inside = {id(module) for block in blocks_of(model) for module in block.modules()}
    chosen = [
        module
        for name, module in model.named_modules()
        if id(module) in inside
        and type(module) is nn.Linear
        and not _is_router(model, name)
        and not any(size % STEP for size in module.weight.shape)
        and "forward" not in vars(module)
    ]
    if not chosen:
        message = f"train.float8: {recipe} has no effect: no linear layer's sizes are multiples of {STEP}"
        raise UserError(Problem(message, "write `float8: none`"))
    for linear in chosen:
        linear.__class__ = Float8Linear  # its parameters stay the objects that a layout has placed
        linear.config, linear.linear_mm_config = config, products


def _is_router(model: nn.Module, name: str) -> bool:
    """Returns whether a linear layer selects experts. A part of a fused layer, such as its gate, does not."""
    return name.endswith(ROUTERS) and not isinstance(model.get_submodule(name.rpartition(".")[0]), Parts)


def _check(recipe: str, device: torch.device) -> None:
    if find_spec("torchao") is None:
        message = f"train.float8: {recipe} needs the package torchao"
        raise UserError(Problem(message, "pip install 'stoker[torchao]'"))
    if device.type == "cpu":
        return
    least = CAPABLE[recipe]
    if not is_nvidia(device) or torch.cuda.get_device_capability(device) < least:
        needs = f"an NVIDIA GPU of compute capability {least[0]}.{least[1]} or later"
        raise CannotRun(Problem(f"train.float8: {recipe} needs {needs}", "write `float8: none`"))
