"""Preparation of a user's module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stoker.checkpoint.run_weights import trainable
from stoker.errors import UserError
from stoker.hardware.process_device import Device
from stoker.job.resolved import ResolvedJob
from stoker.parallel.mesh import Mesh
from stoker.parallel.plain_module import spread_module
from stoker.train.module_task import ModuleTask, fingerprint_of
from stoker.train.prepared import Prepared, apply_job_to_blocks, describe_parameters, engine_of


def prepare_module(
    job: ResolvedJob, model: nn.Module, *, loss: Any, data: Any, held_out: Any, device: Device, mesh: Mesh | None = None
) -> Prepared:
    """Prepares a module, its loss and its data; with a mesh the module must be the same on every process."""
    job = job.model_copy(update={"train": job.train.model_copy(update={"precision": device.precision})})
    dtype = torch.float64 if device.precision == "fp64" else None
    model = model.to(device.torch, dtype)
    if not trainable(model):
        raise UserError(f"{type(model).__name__} has no parameter that is trained")
    task = ModuleTask(model, loss, data, held_out, seed=job.seed, device=device.torch, dtype=dtype)
    facts = {"model": f"{type(model).__name__}: {describe_parameters(model)}"}
    parts = None
    if mesh is None:
        apply_job_to_blocks(job, model, device)
    else:
        parts = spread_module(model, mesh, compiled=job.train.compile, compute=device.autocast_dtype)
        assert parts.root is not None
        task.root = parts.root
    fingerprints = {"data": fingerprint_of(task.data)}
    return Prepared(job, task, device, facts, fingerprints, engine_of(task, device, mesh, parts), mesh=mesh)
