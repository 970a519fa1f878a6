"""Copies of float32 weights in the type of products, for passes that generate answers.

Autocast keeps none in inference mode: each step would read all weights in float32, and write and read them in 16 bits,
which takes four times as long as reading the copies.

Shapes: I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from stoker.models.autocast import autocast_dtype
from stoker.models.critic import is_of_critic

COPY = "weight_in_product_dtype"  # attribute of a layer whose copy is in use


class CastWeights:
    """Copies of the weights of a model's plain linear layers, those of LoRA included, without a critic's.

    Attributes:
        layers: the layers.
        nbytes: bytes of their copies.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        # LoRA reads the weight of its base layer itself, and casts it.
        bases = {layer.base_layer for layer in model.modules() if isinstance(layer, LoraLayer)}
        self.layers = [
            layer
            for name, layer in model.named_modules()
            if type(layer) is nn.Linear
            and not is_of_critic(name)  # whose weights may be on the host meanwhile
            and layer not in bases
            and "forward" not in vars(layer)  # else a layout has replaced it
            and type(layer.weight) is nn.Parameter
            and layer.weight.dtype == torch.float32
        ]
        self._dtype = dtype
        self._copies: list[Tensor] = []
        self.nbytes = dtype.itemsize * sum(layer.weight.numel() for layer in self.layers)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The layers use copies of their current weights within the block. They keep their addresses."""
        weights = [layer.weight.detach() for layer in self.layers]
        if not self._copies:
            self._copies = [torch.empty_like(weight, dtype=self._dtype) for weight in weights]
        if weights:
            torch._foreach_copy_(self._copies, weights)
        for layer, copy in zip(self.layers, self._copies, strict=True):
            setattr(layer, COPY, copy)
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in self.layers:
                delattr(layer, COPY)
                del layer.forward


def weight_in(layer: nn.Linear, dtype: torch.dtype | None) -> Tensor:
    """Returns a layer's weight, shape (O, I), in the type of products: the copy, if one is in use.

    Args:
        dtype: None to leave the type.
    """
    if dtype is None:
        return layer.weight
    return getattr(layer, COPY) if COPY in vars(layer) else layer.weight.to(dtype)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    copy: Tensor = getattr(layer, COPY)
    # Some routers leave autocast.
    return F.linear(x, copy if autocast_dtype(x) == copy.dtype else layer.weight, layer.bias)
