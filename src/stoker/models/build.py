"""The job's model, ready to be trained: its weights, on its device, with its adapters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from stoker.hardware.device import Device
from stoker.job.schema import Job
from stoker.models.adapters import add_adapter
from stoker.models.load import load_model
from stoker.models.lora import fuse_lora


def build_model(job: Job, base: Path, device: Device, *, stop_id: int | None = None) -> nn.Module:
    """The job's model on its device, in training mode, with fresh adapters where it is tuned with them."""
    assert job.model is not None
    # Trained weights are float32; a frozen base is held in the precision that it is computed in.
    frozen = job.tune.method != "full" and device.autocast_dtype is not None
    dtype = device.autocast_dtype if frozen and device.autocast_dtype is not None else torch.float32
    model: nn.Module = load_model(job.model, base, seed=job.seed, dtype=dtype, stop_id=stop_id)
    if job.model.quantise == "none":
        model = model.to(device.torch)
    if job.tune.method != "full":
        torch.manual_seed(job.seed)
        model = add_adapter(model, job.tune)  # type: ignore[arg-type]
        fuse_lora(model)
    return model.train()
