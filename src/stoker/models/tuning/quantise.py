"""Frozen bases in 8 or 4 bits, by bitsandbytes or torchao."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from tempfile import TemporaryDirectory
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stoker.errors import Problem, UserError
from stoker.hardware.process_device import Device, choose_device
from stoker.job.layout import Layout
from stoker.job.resolved import ResolvedJob
from stoker.models.router_balance import routers_of
from stoker.models.tuning.packed_experts import pack_experts, unpack_4bit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUP = 32  # inputs that share a scale in torchao's 4 bits
# A forward and backward pass of a LLaMA of width 576 under LoRA, on a processor that has instructions for bfloat16:
# 0.19 s in float32, 0.31 to 0.36 s in bfloat16 (2026-11-21). Without such instructions it is twenty times.
WHY_FP32 = "bf16 takes 1.6 times as long on a processor, and more where that has no instructions for it"


@dataclass(frozen=True)
class QuantisedForm:
    """A way to quantise a base.

    Attributes:
        description: one line for users.
        package: the package that implements it.
        extra: the extra of Stoker that installs the package.
        config: makes transformers' settings from the types of computation and of storage.
        loading: the same settings as a user writes them.
        kept: the setting with the layers that stay whole.
    """

    description: str
    package: str
    extra: str
    config: Callable[[torch.dtype, torch.dtype], Any]
    loading: str
    kept: str = "llm_int8_skip_modules"

    def loading_of(self, model: nn.Module) -> str:
        """Returns the settings for a model, as a user writes them."""
        kept = layers_kept_whole(model)
        return f"{self.loading[:-1]}, {self.kept}={kept})" if kept else self.loading


def _nf4(compute: torch.dtype, storage: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=storage,
    )


def _int8_bitsandbytes(compute: torch.dtype, storage: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def _int8_torchao(compute: torch.dtype, storage: torch.dtype) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _int4_torchao(compute: torch.dtype, storage: torch.dtype) -> Any:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    bits = torch.int4  # type: ignore[attr-defined]
    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=bits, granularity=PerGroup(GROUP)))


FORMS: dict[str, QuantisedForm] = {
    "4bit": QuantisedForm(
        "nf4 with double quantisation (bitsandbytes)",
        "bitsandbytes",
        "quantise",
        _nf4,
        'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)',
    ),
    "8bit": QuantisedForm(
        "int8, a scale for each output (bitsandbytes)",
        "bitsandbytes",
        "quantise",
        _int8_bitsandbytes,
        "BitsAndBytesConfig(load_in_8bit=True)",
    ),
    "int8": QuantisedForm(
        "int8, a scale for each output (torchao)",
        "torchao",
        "torchao",
        _int8_torchao,
        "TorchAoConfig(Int8WeightOnlyConfig())",
        "modules_to_not_convert",
    ),
    "int4": QuantisedForm(
        f"int4, a scale for each {GROUP} inputs, a byte each (torchao)",
        "torchao",
        "torchao",
        _int4_torchao,
        f"TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup({GROUP})))",
        "modules_to_not_convert",
    ),
}
ANY_WIDTH = "8bit takes matrices of any width"
AVX512 = "support_avx512bf16_for_cpu"  # whether a 4-bit layer may use the kernel, in bitsandbytes
OTHER = {"4bit": "int4", "8bit": "int8", "int8": "8bit", "int4": "4bit"}  # as small, of the other package


def quantisation(
    quantise: str,
    compute: torch.dtype,
    *,
    storage: torch.dtype = torch.uint8,
    model: nn.Module | None = None,
    kept: Collection[str] | None = None,
) -> Any:
    """transformers' quantisation settings of ``model.quantise``, or None.

    Args:
        compute: type of the products with the base.
        storage: type that packed 4-bit numbers are stored in: ``fully_shard`` shards floating-point types only.
        model: the model, whose routers stay whole; None if it has none.
        kept: stacked experts that stay whole, by name; None for all, as plain transformers keeps them. Only 4 bits
            pack experts.

    Raises:
        UserError: the package that it needs is not installed.
    """
    if quantise == "none":
        return None
    form = FORMS[quantise]
    if find_spec(form.package) is None:
        message = f"model.quantise: {quantise} needs the package {form.package}"
        other = FORMS[OTHER[quantise]]
        hint = f"pip install 'stoker[{form.extra}]'"
        if find_spec(other.package) is not None:
            hint += f", or write `model.quantise: {OTHER[quantise]}` beside `tune: lora`, as {other.package} is here"
        raise UserError(Problem(message, hint))
    config = form.config(compute, storage)
    if model is not None and (layers := layers_kept_whole(model)):
        setattr(config, form.kept, layers)
    if model is not None and kept is not None and quantise == "4bit":
        pack_experts(config, model, kept)
    return config


def layers_kept_whole(model: nn.Module) -> list[str]:
    """Returns patterns of the linear layers that stay whole if some are routers, which choose by small differences.

    transformers then keeps no other layer whole by itself, so the head is among them. Empty without such routers.
    """
    names = {module: name for name, module in model.named_modules()}
    routers = [names[m] for router in routers_of(model) for m in router.modules() if isinstance(m, nn.Linear)]
    if not routers:
        return []
    below = sorted({re.sub(r"\.\d+\.", ".*.", name.removesuffix(".base_layer"), count=1) for name in routers})
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [*below, names[head]] if head in names else below


def is_quantised(job: ResolvedJob) -> bool:
    """Returns whether the job's base is quantised."""
    return job.model is not None and job.model.quantise != "none"


def device_for(job: ResolvedJob, on: torch.device | None = None) -> Device:
    """Returns this process' device with the job's precision; a quantised base computes in float32 on a CPU."""
    device = choose_device(job.train.precision, on)
    if is_quantised(job) and device.type == "cpu" and job.train.precision == "auto":
        return Device(device.type, "fp32", WHY_FP32, device.index)
    return device


def cut_by(job: ResolvedJob) -> bool:
    """Returns whether the layout shards the packed weights of the base: zero3 with bitsandbytes' 4 bits does."""
    return job.parallel.shard == "zero3" and job.model is not None and job.model.quantise == "4bit"


def describe_quantisation(job: ResolvedJob, device: Device, layout: Layout, model: nn.Module) -> str | None:
    """Describes in one line how the job's base is stored and computed; None if it is not quantised."""
    if not is_quantised(job):
        return None
    assert job.model is not None
    line = f"{FORMS[job.model.quantise].description}, computed in {device.precision}"
    if device.type == "cpu" and device.precision == "fp32":
        line += f": {WHY_FP32}"
    if cut_by(job):
        line += "; the packed weights are sharded"
    elif layout.zero:
        line += "; every process holds them whole, what is trained is sharded"
    experts = [p for name, p in model.named_parameters() if "experts" in name and p.ndim == 3 and not p.requires_grad]
    if whole := sum(p.numel() for p in experts):
        line += f"; {whole / 1e6:,.1f} M parameters of experts are not quantised"
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    packed = {layer.in_features for layer in layers if type(layer).__name__ == "Linear4bit"}
    if damaged := damaged_widths(packed, device.torch):
        line += (
            f"; WARNING: the installed bitsandbytes reads layers of {damaged[0]} inputs wrongly on this device, so "
            "that other programs have another base: write `quantise: 8bit`"
        )
    return line


def packed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Returns the quantised parameters, before sharding."""
    return {p for p in model.parameters() if _is_packed(p)}


def _is_packed(parameter: nn.Parameter) -> bool:
    return not parameter.is_meta and type(parameter) is not nn.Parameter


def unpacker(layer: nn.Module) -> Callable[[], Tensor] | None:
    """Returns a function that unpacks a quantised linear layer's matrix (outputs, inputs); None for other layers.

    It returns the values that the layer itself computes with, also while ``fully_shard`` has gathered them.
    """
    if not isinstance(layer, nn.Linear):
        return None
    for kind, unpack in (("Linear4bit", unpack_4bit), ("Linear8bitLt", _unpack_8bit)):
        if type(layer).__name__ == kind:
            return MethodType(unpack, layer)
    return MethodType(_unpack_torchao, layer) if type(layer.weight).__module__.startswith("torchao") else None


def _unpack_8bit(layer: Any) -> Tensor:
    scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
    return layer.weight.data.to(scales.dtype).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


def _unpack_torchao(layer: Any) -> Tensor:
    return layer.weight.dequantize()


def can_be_cut(parameter: nn.Parameter) -> bool:
    """Returns whether ``fully_shard`` can shard a packed parameter, see `quantisation`."""
    return getattr(parameter, "quant_state", None) is not None and parameter.is_floating_point()


def unpacked_numel(parameter: nn.Parameter) -> int:
    """Returns the number of weights in a parameter, packed or not."""
    state = getattr(parameter, "quant_state", None)
    return prod(state.shape) if state is not None else parameter.numel()


def quantised_copy(model: PreTrainedModel, quantise: str, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a copy with quantised linear layers of a model that transformers can save.

    Args:
        dtype: of the products, and of the parameters that are not quantised.

    Raises:
        UserError: the package is not installed, quantises no layer of this model, or not matrices of these widths.
    """
    config = quantisation(quantise, dtype, model=model)
    check_widths(model, quantise)
    if quantise == "4bit" and (damaged := damaged_widths(_inputs(model, conv=True).values(), model.device)):
        message = f"the installed bitsandbytes reads layers of {damaged[0]} inputs wrongly on this device"
        raise UserError(Problem(message, ANY_WIDTH))
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        held = type(model).from_pretrained(folder, dtype=dtype, quantization_config=config)
    check_quantised(held, quantise)
    return held


def check_widths(model: PreTrainedModel, quantise: str) -> None:
    """Checks that ``quantise`` takes the matrices of a model, whose parameters may be on the meta device.

    Raises:
        UserError: it does not; the error names the first such layer.
    """
    for name, width in _inputs(model).items() if quantise == "int4" else ():
        if width % GROUP:
            message = f"int4 shares a scale among {GROUP} inputs, and the layer {name} has {width}"
            raise UserError(Problem(message, ANY_WIDTH, key="model.quantise"))


def _inputs(model: PreTrainedModel, *, conv: bool = False) -> dict[str, int]:
    """Returns the number of inputs of each layer that may be quantised, by name.

    Args:
        conv: whether GPT-2's kind of linear layer is one of them, as for bitsandbytes.
    """
    from transformers.pytorch_utils import Conv1D

    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    layers = [(name, layer) for name, layer in model.named_modules() if layer not in ends]
    found = {name: layer.in_features for name, layer in layers if isinstance(layer, nn.Linear)}
    return found | {name: layer.nx for name, layer in layers if conv and isinstance(layer, Conv1D)}


def damaged_widths(widths: Iterable[int], device: torch.device) -> list[int]:
    """Returns the widths of 4-bit matrices that bitsandbytes unpacks with scales of other weights.

    bitsandbytes 0.50 does on a processor, for multiples of 16 that are no multiples of the 64 weights of a scale.
    """
    return [width for width in sorted(set(widths)) if not _is_unpacked_right(width, device.type)]


@cache
def _is_unpacked_right(width: int, device: str) -> bool:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.linspace(-1, 1, 64 * width, device=device).view(64, width)
    packed, state = quantize_4bit(weight, quant_type="nf4")
    unpacked = dequantize_4bit(packed, state)
    state.shape = torch.Size((1, weight.numel()))  # one row, whose scales are in the order of the weights
    return torch.equal(unpacked.flatten(), dequantize_4bit(packed, state).flatten())


def check_quantised(model: PreTrainedModel, quantise: str) -> None:
    """Refuses a model without quantised parameters; makes others compute the same in every mode.

    Raises:
        UserError: no parameter is quantised.
    """
    if not packed_parameters(model):
        message = f"model.quantise: {FORMS[quantise].package} quantises no layer of a {model.config.model_type}"
        raise UserError(Problem(message, f"write `quantise: {OTHER[quantise]}`"))
    compute_exactly(model)
    for parameter in model.parameters():  # others are views of the mapped file, and would keep it in memory
        if not _is_packed(parameter):
            parameter.data = parameter.data.clone()


def compute_exactly(model: nn.Module) -> None:
    """Disables bitsandbytes' kernel for inference on processors with bfloat16 in a model's 4-bit layers.

    The first pass in evaluation mode would repack the weights in place; later passes would round to bfloat16 and pass
    no gradient, even back in training mode.
    """
    for module in model.modules():
        if hasattr(module, AVX512):
            setattr(module, AVX512, False)
