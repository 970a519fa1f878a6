"""The job's model, ready to be trained: its weights, on its device, with its adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from stoker.hardware.device import Device
from stoker.job.layout import layout_of
from stoker.job.schema import Job
from stoker.models.adapters import add_adapter
from stoker.models.form import training_form
from stoker.models.load import blank_model
from stoker.models.lora import fuse_lora
from stoker.models.meta import allocate
from stoker.models.quantise import cut_by
from stoker.models.weights import Assembled, fill_whole


@dataclass(frozen=True)
class Built:
    """A model as it is trained, in training mode, and where its weights come from.

    Attributes:
        model: with its parameters on the meta device, its buffers real. Only a quantised base has its weights already.
        weights: by the names that the model's parameters have now.
    """

    model: nn.Module
    weights: Assembled


def build_meta(job: Job, base: Path, device: Device, *, stop_id: int | None = None) -> Built:
    """The job's model without memory: fused layers split, adapters inserted.

    Args:
        base: the folder that relative paths start from.
        stop_id: of a model from scratch, the end token to write into its configuration.

    Raises:
        UserError: the model cannot be found or loaded, or a target of the adapters names no layer.
    """
    assert job.model is not None
    # Trained weights are float32 (float64 where that is asked for); a frozen base is held as it is computed in.
    trained = torch.float64 if device.precision == "fp64" else torch.float32
    frozen = job.tune.method != "full"
    dtype = (device.autocast_dtype if frozen else None) or trained
    storage = dtype if cut_by(job, layout_of(job)) else torch.uint8
    blank = blank_model(job.model, base, seed=job.seed, dtype=dtype, stop_id=stop_id, storage=storage)
    model: nn.Module = blank.model
    quantised = not any(p.is_meta for p in model.parameters())
    parts = training_form(blank.model)
    if frozen:
        model = add_adapter(blank.model, job.tune)
        fuse_lora(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    transposed = frozenset(
        f"{name}.base_layer.weight"
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer) and getattr(layer, "fan_in_fan_out", False)
    )
    weights = Assembled(blank.weights, shapes, job.seed, parts, transposed)
    if quantised:
        drawn = {n: p for n, p in model.named_parameters() if ".lora_" in n and ".lora_magnitude_vector." not in n}
        fill_whole(drawn, weights)
    return Built(model.train(), weights)


def build_model(job: Job, base: Path, device: Device, *, stop_id: int | None = None) -> nn.Module:
    """The job's whole model on its device. See `build_meta`."""
    built = build_meta(job, base, device, stop_id=stop_id)
    fill_whole(allocate(built.model, device.torch), built.weights)
    return built.model
