"""The experts of a frozen mixture in 4 bits: packed while they are read, unpacked for each product.

transformers quantises linear layers, and the experts of a block are tensors of all their matrices. bitsandbytes packs
such a tensor as `bitsandbytes.nn.parametrize.replace_parameter_4bit` does; autograd would keep the unpacked copy that
this function's parametrization makes until the backward pass, so the products here unpack once more instead.

Shapes: E experts, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.utils.quantization_config import BitsAndBytesConfig, QuantizationMethod

WITH_EXPERTS = "stoker_4bit"  # the name of this quantiser in transformers' table
# of bitsandbytes' `replace_parameter_4bit`
PACKING: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
WHOLE = {"modules_to_save", "original_module"}  # peft's names of modules that are trained in full
MOST = 2**31 - 1  # weights of a tensor: bitsandbytes counts them in 32 bits


class PackedExperts(nn.Module):
    """A tensor of experts' matrices in 4 bits, at the place of the parameter (E, O, I) or (E, I, O)."""

    def __init__(self, packed: Any) -> None:
        """Takes over a ``Params4bit``."""
        super().__init__()
        self.weight, self.quant_state = packed, packed.quant_state
        self.shape = packed.quant_state.shape
        # bitsandbytes 0.50 unpacks one row with the right scales on every device, see `quantise.damaged_widths`.
        self.quant_state.shape = torch.Size((1, self.shape.numel()))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the unpacked matrices."""
        found: torch.dtype = self.quant_state.dtype
        return found

    def unpack(self) -> Tensor:
        """Returns the matrices, shape (E, O, I) or (E, I, O)."""
        return unpack_4bit(self).view(self.shape)

    def transpose(self, first: int, second: int) -> TransposedExperts:
        """Returns a view with the last two dimensions exchanged."""
        assert {first % 3, second % 3} == {1, 2}
        return TransposedExperts(self)

    def __getitem__(self, index: Any) -> Tensor:
        """Returns the unpacked matrices of some experts."""
        return self.unpack()[index]


@dataclass(frozen=True)
class TransposedExperts:
    """The matrices of `PackedExperts` with the last two dimensions exchanged."""

    experts: PackedExperts

    @property
    def dtype(self) -> torch.dtype:
        """The type of the unpacked matrices."""
        return self.experts.dtype

    def unpack(self) -> Tensor:
        """Returns the matrices, shape (E, I, O) or (E, O, I)."""
        return self.experts.unpack().transpose(-2, -1)


def unpack_4bit(layer: Any) -> Tensor:
    """Returns the matrix of a module with a packed weight and its scales."""
    from bitsandbytes.functional import dequantize_4bit

    # Gathering a sharded weight makes it a plain parameter; the layer keeps the scales.
    return dequantize_4bit(layer.weight.data.view(-1, 1), layer.quant_state)


def stacks_of(model: nn.Module, prefix: str = "", *, recurse: bool = True) -> dict[str, nn.Parameter]:
    """Returns the parameters with the matrices of all experts of a block, by name.

    Args:
        prefix: the model's own name.
        recurse: whether modules in the model are searched, too.
    """
    return {
        f"{name}.{key}": parameter
        for name, module in (model.named_modules(prefix=prefix) if recurse else [(prefix, model)])
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and parameter.shape[0] == getattr(module, "num_experts", None)
    }


def takes_other_operands(experts: nn.Module) -> bool:
    """Returns whether a module multiplies with its experts by transformers' grouped products, or Stoker's.

    Only these take `PackedExperts` in the place of a tensor; a model's own code may call any function of torch.
    """
    return hasattr(experts, "has_gate") or type(experts).__name__ == "Llama4TextExperts"


def pack_experts(config: BitsAndBytesConfig, model: nn.Module, kept: Collection[str]) -> None:
    """Has transformers pack the experts of a model, too, when it loads it with these settings.

    Args:
        kept: names of the parameters that stay whole.
    """
    names = [name for name in _packable(model) if name not in kept]
    if names:
        AUTO_QUANTIZER_MAPPING[WITH_EXPERTS] = _Quantizer
        settings: Any = config
        settings.quant_method, settings.experts = WITH_EXPERTS, names


def has_packed_experts(model: nn.Module) -> bool:
    """Returns whether experts of a model are packed."""
    return any(isinstance(module, PackedExperts) for module in model.modules())


def pack_loaded_experts(model: nn.Module) -> None:
    """Packs the experts of a loaded model that have no adapter, as every program with bitsandbytes can."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    adapted = {(wrapper.get_base_layer(), wrapper.parameter_name) for wrapper in wrappers}
    for name in _packable(model):
        holder, _, key = name.rpartition(".")
        experts = model.get_submodule(holder)
        if (experts, key) not in adapted and not WHOLE.intersection(holder.split(".")):
            replace_parameter_4bit(experts, key, **PACKING)


def _packable(model: nn.Module) -> list[str]:
    return [
        name
        for name, stack in stacks_of(model).items()
        if stack.numel() <= MOST and takes_other_operands(model.get_submodule(name.rpartition(".")[0]))
    ]


class _Quantizer(Bnb4BitHfQuantizer):
    """transformers' quantiser of linear layers, which packs experts as well."""

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        return param_name in self._experts or super().param_needs_quantization(model, param_name, **options)

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self, super().get_quantize_ops())

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        for name in self._experts:
            holder, _, key = name.rpartition(".")
            experts = model.get_submodule(holder)
            packed = PackedExperts(experts.get_parameter(key))
            delattr(experts, key)
            experts.add_module(key, packed)
        settings: Any = self.quantization_config
        settings.quant_method = QuantizationMethod.BITS_AND_BYTES  # as the rest of transformers knows it
        del settings.experts
        return super()._process_model_after_weight_loading(model, **options)

    @property
    def _experts(self) -> Collection[str]:
        found: Collection[str] = getattr(self.quantization_config, "experts", ())
        return found


class _Pack(ConversionOps):
    def __init__(self, quantizer: _Quantizer, linear: ConversionOps) -> None:
        self._quantizer, self._linear = quantizer, linear

    def convert(self, input_dict: dict[str, Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        from bitsandbytes.nn import Params4bit

        ((name, found),) = input_dict.items()
        if name not in self._quantizer._experts:
            converted: dict[str, Any] = self._linear.convert(input_dict, *arguments, **options)
            return converted
        settings = self._quantizer.quantization_config
        value = (found[0] if isinstance(found, list) else found).to(settings.bnb_4bit_compute_dtype)
        packed: Any = Params4bit(
            value,
            requires_grad=False,
            quant_storage=settings.bnb_4bit_quant_storage,
            **PACKING,
        )
        return {name: packed.to(value.device)}
