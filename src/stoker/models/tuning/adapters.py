"""LoRA adapters with peft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from stoker.errors import UserError
from stoker.job.resolved import ResolvedTune
from stoker.models.meta_model import set_parameter
from stoker.models.tuning.adapter_targets import AdaptableLayer, layers_to_adapt, modules_trained_whole
from stoker.models.tuning.virtual_tokens import virtual_of, virtual_tokens_off


def lora_config(tune: ResolvedTune, layers: Sequence[AdaptableLayer]) -> LoraConfig:
    """peft's configuration of a ``tune:`` block for these layers."""
    return LoraConfig(
        r=tune.rank,
        lora_alpha=tune.alpha,  # type: ignore[arg-type]  # peft takes fractions as well
        lora_dropout=tune.dropout,
        target_modules=[layer.name for layer in layers if not layer.stacked],
        target_parameters=[layer.name for layer in layers if layer.stacked] or None,
        use_rslora=tune.rslora,
        use_dora=tune.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )


def add_adapter(model: PreTrainedModel, tune: ResolvedTune) -> PeftModel:
    """Inserts LoRA matrices and freezes everything but them and the modules that are trained in full.

    These modules stay at their paths, so that every layout splits them as in full training; they are listed in peft's
    configuration.

    Raises:
        UserError: a target or a module to train is not in the model, or cannot be adapted or trained.
    """
    whole = modules_trained_whole(model, tune.modules_to_save)
    adapted = get_peft_model(model, lora_config(tune, layers_to_adapt(model, tune, whole)))
    if whole:
        _train(model, whole)
        config: Any = adapted.peft_config["default"]
        config.modules_to_save = whole
        trained = [id(p) for name in whole for p in model.get_submodule(name).parameters()]
        config.ensure_weight_tying = len(set(trained)) < len(trained)
    return adapted


def trained_whole(model: nn.Module) -> list[str]:
    """Returns the modules that are trained in full with an adapter, by their names in the model without it."""
    if not isinstance(model, PeftModel):
        return []
    return list(getattr(model.peft_config.get("default"), "modules_to_save", None) or [])


def _train(model: PreTrainedModel, whole: Sequence[str]) -> None:
    """Makes modules trainable, in float32 at least; their outputs keep the type of the frozen weights."""
    new: dict[int, nn.Parameter] = {}
    for name in whole:
        for path, module in model.get_submodule(name).named_modules(prefix=name):
            for parameter in module.parameters(recurse=False):
                # torchao's tensors report a floating-point dtype, but are a tensor subclass.
                if not parameter.is_floating_point() or type(parameter.data) is not torch.Tensor:
                    raise UserError(f"tune.modules_to_save: {path} is quantised, and such weights cannot be trained")
                kept = torch.promote_types(parameter.dtype, torch.float32)
                new.setdefault(id(parameter), nn.Parameter(parameter.detach().to(kept)))
                if kept != parameter.dtype:
                    module.register_forward_hook(partial(_in_type, parameter.dtype))
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in new:
            set_parameter(model, name, new[id(parameter)])


def _in_type(dtype: torch.dtype, _: nn.Module, _arguments: Any, out: Any) -> Any:
    return out.to(dtype) if isinstance(out, torch.Tensor) and out.is_floating_point() else out


def keep_originals(model: nn.Module) -> None:
    """Copies the first weights of the modules that are trained whole, for `without_adapter`."""
    if whole := trained_whole(model):
        base = unwrap(model)
        named = [(f"{name}.{key}", p) for name in whole for key, p in base.get_submodule(name).named_parameters()]
        model.originals = {name: p.detach().clone() for name, p in named}  # type: ignore[assignment]


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Makes the model, or the list of its stages, compute as before tuning, within the block."""
    if isinstance(model, nn.ModuleList):
        with ExitStack() as stack:
            for stage in model:
                stack.enter_context(without_adapter(stage))
            yield
        return
    if not isinstance(model, PeftModel):
        with virtual_tokens_off(virtual_of(model)):
            yield
        return
    originals: dict[str, torch.Tensor] = getattr(model, "originals", {})
    assert originals or not trained_whole(model), "the weights before tuning were not kept"
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    before = [layer._disable_adapters for layer in layers]
    base = unwrap(model)
    shared = {id(p): p for p in map(base.get_parameter, originals)}
    tuned = {key: p.data for key, p in shared.items()}
    try:
        for name, original in originals.items():
            base.get_parameter(name).data = original
        for layer in layers:  # peft's own switch changes which parameters are trained, too
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled
        for key, p in shared.items():
            p.data = tuned[key]


def unwrap(model: nn.Module) -> PreTrainedModel:
    """Returns the causal language model without the adapters' wrapper; the adapters inside are kept."""
    if not isinstance(model, PeftModel):
        return model  # type: ignore[return-value]
    # Not `PeftModel.get_base_model`, which needs an adapter to be there.
    base = model.base_model
    return base.model if isinstance(base, BaseTuner) else base  # type: ignore[return-value]
