"""Adapters: a few trained weights beside frozen ones, by peft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from stoker.errors import UserError
from stoker.job.schema import TuneBlock
from stoker.models.split import Parts, split_targets
from stoker.models.virtual import without_virtual_tokens


def lora_config(tune: TuneBlock, targets: str | list[str]) -> LoraConfig:
    """peft's configuration of a ``tune:`` block."""
    assert tune.alpha != "auto", "the job is resolved before its model is built"
    return LoraConfig(
        r=tune.rank,
        lora_alpha=tune.alpha,  # type: ignore[arg-type]  # peft takes fractions as well
        lora_dropout=tune.dropout,
        target_modules=targets,
        use_rslora=tune.rslora,
        use_dora=tune.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )


def add_adapter(model: PreTrainedModel, tune: TuneBlock) -> PeftModel:
    """Wraps the model with fresh LoRA matrices; everything else is frozen.

    Raises:
        UserError: a target names no layer of the model.
    """
    targets = tune.targets
    if isinstance(targets, list):
        _check_targets(model, targets)
        targets = split_targets(model, targets)
    return get_peft_model(model, lora_config(tune, targets))


def _check_targets(model: nn.Module, targets: list[str]) -> None:
    linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if _is_layer(module)}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules()):
            near = get_close_matches(target, sorted(linear), 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(
                f"tune.targets: the model has no layer {target!r}; {hint}it has {', '.join(sorted(linear))}"
            )


def _is_layer(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(module, Parts) or (isinstance(weight, torch.Tensor) and weight.dim() == 2)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Within it the model computes what it did before tuning."""
    with model.disable_adapter() if isinstance(model, PeftModel) else without_virtual_tokens(model):
        yield


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The causal language model itself, with its adapters inside where there are any."""
    return model.get_base_model() if isinstance(model, PeftModel) else model  # type: ignore[return-value]
