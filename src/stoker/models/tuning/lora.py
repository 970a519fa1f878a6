"""LoRA's forward and backward pass in the fewest matrix products and the least memory.

peft computes ``W x + scaling * B(A(x))`` as separate modules: two passes over the full output for the scaling
and the sum, and autograd saves the inputs of each. Here the scaling is applied to the narrow ``A(x)`` and the
product with ``B`` is added to ``W x`` in place; only ``x`` and ``A(x)`` are saved. The mathematics, the parameters and
the file format are peft's. A quantised base is unpacked for each product, forward and backward.

Shapes: N tokens, I input width, O output width, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from stoker.models import grouped_experts
from stoker.models.autocast import autocast_dtype
from stoker.models.cast_weights import weight_in
from stoker.models.tuning.expert_lora import multiply_by_parts
from stoker.models.tuning.packed_experts import takes_other_operands
from stoker.models.tuning.quantise import unpacker


class _FusedLora(torch.autograd.Function):
    """y = x W^T + b + scaling * (x A^T) B^T, with W and b frozen.

    If ``weight`` is a function that unpacks W, W is not saved, and is unpacked again in the backward pass.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight: Tensor | Callable[[], Tensor],
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scaling: float,
    ) -> Tensor:
        weight_OI = weight if isinstance(weight, Tensor) else weight()
        narrow_NR = torch.mm(x_NI, a_RI.T).mul_(scaling)
        y_NO = torch.mm(x_NI, weight_OI.T) if bias_O is None else torch.addmm(bias_O, x_NI, weight_OI.T)
        ctx.save_for_backward(x_NI, narrow_NR, a_RI, b_OR, *([weight] if isinstance(weight, Tensor) else []))
        ctx.unpack, ctx.scaling = None if isinstance(weight, Tensor) else weight, scaling
        if torch.compiler.is_compiling():  # torch 2.11 would drop the gradients of a tensor that was changed in place
            return torch.addmm(y_NO, narrow_NR, b_OR.T)
        return y_NO.addmm_(narrow_NR, b_OR.T)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, narrow_NR, a_RI, b_OR, *kept = ctx.saved_tensors
        scaling, grad_x = ctx.scaling, None
        back_NR = torch.mm(grad_NO, b_OR).mul_(scaling)
        if ctx.needs_input_grad[0]:
            grad_x = torch.mm(grad_NO, kept[0] if kept else ctx.unpack()).addmm_(back_NR, a_RI)
        return grad_x, None, None, torch.mm(back_NR.T, x_NI), torch.mm(grad_NO.T, narrow_NR), None


def _forward(layer: Any, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    base, active, unpack = layer.base_layer, layer.active_adapters, layer.unpack
    # Autocast does not reach custom functions, so its conversion is done here.
    cast = autocast_dtype(x)
    plain = (
        "forward" not in vars(base)  # else a layout has replaced it
        and not base.weight.requires_grad  # a score head's
        and not layer.disable_adapters
        and not layer.merged
        and not arguments
        and not options
        and len(active) == 1
        and active[0] in layer.fused_names
        and (unpack is not None or cast is not None or base.weight.dtype == layer.lora_A[active[0]].weight.dtype)
    )
    # bitsandbytes rounds activations to 8 bits for inference, and so does every program that loads the adapter.
    infers = unpack is not None and not layer.training
    if not plain or infers:
        return type(layer).forward(layer, x, *arguments, **options)
    name = active[0]
    weight: Tensor | Callable[[], Tensor] = base.weight if unpack is None else unpack
    if cast is not None and (unpack is not None or base.weight.dtype != cast):
        # The cast is repeated in the backward pass: a copy would be saved until then.
        weight = partial(_cast, unpack or base.weight.detach, cast)
    values = (x.reshape(-1, x.shape[-1]), base.bias)
    x_NI, bias_O = values if cast is None else (v if v is None else v.to(cast) for v in values)
    a_RI, b_OR = weight_in(layer.lora_A[name], cast), weight_in(layer.lora_B[name], cast)
    y = _FusedLora.apply(x_NI, weight, bias_O, a_RI, b_OR, layer.scaling[name])
    return y.view(*x.shape[:-1], y.shape[-1])


def _cast(weight: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return weight().to(dtype)


def fuse_lora(model: nn.Module) -> int:
    """Replaces the forward pass of every plain LoRA layer of a model by the fused one; returns their number.

    A plain layer has adapters without dropout and DoRA, one of them active at a time, and a floating-point linear layer
    or a quantised one that computes in the adapter's dtype as its base. All others keep peft's own pass. Those of
    stacked experts multiply as in `stoker.models.tuning.expert_lora`, and are not counted.
    """
    fused = 0
    for layer in model.modules():
        if isinstance(layer, ParamWrapper):
            if takes_other_operands(layer.get_base_layer()):
                grouped_experts.register()
                multiply_by_parts(layer)
            continue
        if not isinstance(layer, LoraLayer) or not isinstance(layer, nn.Module):
            continue
        unpack = unpacker(layer.base_layer)
        if unpack is None and (type(layer) is not LoraLinear or type(layer.base_layer) is not nn.Linear):
            continue
        held = None if unpack is None else unpack().dtype
        names = frozenset(name for name in layer.lora_A if _is_plain(layer, name, held))
        if names and not layer.fan_in_fan_out:
            _fuse(layer, names, unpack)
            fused += 1
    return fused


def _fuse(layer: Any, names: frozenset[str], unpack: Callable[[], Tensor] | None) -> None:
    layer.fused_names, layer.unpack = names, unpack
    layer.forward = MethodType(_forward, layer)  # torch.compile would compile the partial of each layer by itself


def _is_plain(layer: Any, name: str, unpacked: torch.dtype | None) -> bool:
    same = unpacked in (None, layer.lora_A[name].weight.dtype)
    drops = not isinstance(layer.lora_dropout[name], nn.Identity)
    return same and not drops and not layer.use_dora.get(name, False) and not layer.lora_bias.get(name, False)
