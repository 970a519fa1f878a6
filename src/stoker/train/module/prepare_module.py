"""Preparation of a user's module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stoker.checkpoint.run_weights import trainable
from stoker.errors import UserError
from stoker.hardware.process_device import Device
from stoker.job.layout import layout_of
from stoker.job.resolved import ResolvedJob
from stoker.parallel.apply_to_blocks import apply_to_blocks
from stoker.parallel.data_parallel.plain_module import spread_module
from stoker.parallel.mesh import Mesh
from stoker.train.hooks import Hook
from stoker.train.module.module_task import ModuleTask, fingerprint_of
from stoker.train.module.shared_buffers import SharedBuffers, own_buffers
from stoker.train.prepared import Prepared, describe_parameters, engine_of


def prepare_module(
    job: ResolvedJob, model: nn.Module, *, loss: Any, data: Any, held_out: Any, device: Device, mesh: Mesh | None = None
) -> Prepared:
    """Prepares a module, its loss and its data; with a mesh the module must be the same on every process."""
    job = job.model_copy(update={"train": job.train.model_copy(update={"precision": device.precision})})
    model = model.to(device.torch, torch.float64 if device.precision == "fp64" else None)
    if not trainable(model):
        raise UserError(f"{type(model).__name__} has no parameter that is trained")
    task = ModuleTask(model, loss, data, held_out, seed=job.seed, device=device.torch)
    facts = {"model": f"{type(model).__name__}: {describe_parameters(model)}"}
    parts, hooks = None, tuple[Hook, ...]()
    if mesh is None:
        apply_to_blocks(model, device.torch, layout_of(job), compiled=job.train.compile is True)
    else:
        hooks = _sharing_buffers(model, mesh)
        parts = spread_module(model, mesh, compiled=job.train.compile is True, compute=device.autocast_dtype)
        assert parts.root is not None
        task.root = parts.root
    fingerprints, engine = {"data": fingerprint_of(task.data)}, engine_of(task, device, mesh, parts)
    return Prepared(job, task, device, facts, fingerprints, engine, parallel=parts, mesh=mesh, hooks=hooks)


def _sharing_buffers(model: nn.Module, mesh: Mesh) -> tuple[Hook, ...]:
    group = mesh.groups["batch"]
    if group is None or not own_buffers(model):
        return ()
    shared = SharedBuffers(model, group)
    return (Hook(before_passes=lambda _step: shared.begin(), after_optimizer=lambda _lr, _taken: shared.unite()),)
