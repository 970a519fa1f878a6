"""``module``: any torch.nn.Module with a loss and a dataset, each given as an import path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from stoker.job.block import Block
from stoker.job.task_spec import BlockSpec, Decided, RowSpec, TaskSpec, block_of_task
from stoker.train.own_model import OwnModel

if TYPE_CHECKING:
    from stoker.errors import Problem
    from stoker.hardware.process_device import Device
    from stoker.job.conflicts.conflict_view import View
    from stoker.job.load_job import LoadedJob
    from stoker.job.schema import Job
    from stoker.parallel.mesh import Mesh
    from stoker.train.prepared import Prepared


class ModuleBlock(Block):
    """``task: module``: any torch.nn.Module, given as import paths ``package.module:name``."""

    model: str = Field(description="callable that returns the nn.Module")
    loss: str = Field(description="loss(outputs, targets), the mean over the samples")
    data: str = Field(description="callable that returns a dataset of (inputs, targets)")
    evaluate: str | None = Field(default=None, description="callable that returns the held-out dataset")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the model's callable")


def _defaults(_: Job) -> dict[str, Decided]:
    return {
        "train.lr": Decided(1e-3, "AdamW's usual rate for a network of one's own"),
        "train.weight_decay": Decided(0.0, "none unless asked for, as in a plain PyTorch loop"),
        "evaluate.fraction": Decided(0.0, "module.evaluate gives the held-out data, if any"),
        "evaluate.rows": Decided("all", "the held-out dataset is used whole"),
    }


def _import_paths(view: View) -> Iterator[Problem]:
    for name in ("model", "loss", "data", "evaluate"):
        key = ("module", name)
        path = view.value(".".join(key))
        package, _, attribute = (path or "").partition(":")
        words = [*package.split("."), *attribute.split(".")]
        if path is not None and not all(word.isidentifier() for word in words):
            yield view.document.problem(key, f"`{path}` is not an import path", "write `package.module:name`")


def _held_out(view: View) -> Iterator[Problem]:
    from stoker.job.conflicts.all_conflicts import two_evaluations

    if view.value("task") != "module":
        return
    if view.value("module.evaluate"):
        yield from two_evaluations(view, "module.evaluate")
    elif _is_number(view, "evaluate.fraction"):
        message = "`evaluate.fraction` holds out rows of `data`, and `task: module` has a dataset of its own"
        yield from view.at_each(["evaluate.fraction"], message, "name the held-out dataset in `module.evaluate`")
    if _is_number(view, "evaluate.rows"):
        message = "`evaluate.rows` has no effect in `task: module`, which evaluates all samples of `module.evaluate`"
        yield from view.at_each(["evaluate.rows"], message, "remove it")


def _is_number(view: View, key: str) -> bool:
    """Returns whether a number above 0 was written; a run of an earlier version may have recorded one."""
    value = view.value(key)
    return view.given(key) and value != "all" and value > 0 and not view.is_recorded(key)


def _prepare(loaded: LoadedJob, device: Device, mesh: Mesh | None, _: Path) -> Prepared:
    import torch
    from torch import nn

    from stoker.errors import UserError
    from stoker.train.module.import_object import call_import_path, import_path, with_errors_at
    from stoker.train.module.module_task import ModuleTask
    from stoker.train.module.prepare_module import prepare_module

    block = block_of_task(loaded.job, ModuleBlock)
    torch.manual_seed(loaded.job.seed)
    model = call_import_path(block.model, "module.model", loaded, **block.arguments)
    if not isinstance(model, nn.Module):
        message = f"module.model: {block.model} gives a {type(model).__name__}, not a torch.nn.Module"
        raise UserError(loaded.problem("module.model", message))
    loss = with_errors_at("module.loss", loaded, block.loss, import_path(block.loss, "module.loss", loaded))
    data = call_import_path(block.data, "module.data", loaded)
    held_out = call_import_path(block.evaluate, "module.evaluate", loaded) if block.evaluate else None
    with loaded.errors_at_their_keys():
        found = prepare_module(loaded.job, model, loss=loss, data=data, held_out=held_out, device=device, mesh=mesh)
    assert isinstance(found.task, ModuleTask)
    found.task.root = with_errors_at("module.model", loaded, block.model, found.task.root)
    return found


def _toy(loaded: LoadedJob) -> tuple[dict[str, Any], int, tuple[str, ...]]:
    """Returns the module itself: its size is its author's choice."""
    from stoker.train.module.import_object import call_import_path
    from stoker.train.module.module_task import as_dataset

    block = block_of_task(loaded.job, ModuleBlock)
    samples = as_dataset(call_import_path(block.data, "module.data", loaded), "data")
    values = {name: value for name, value in block.model_dump().items() if value not in (None, {})}
    return {"module": values}, len(samples), ()  # type: ignore[arg-type]


TASK = TaskSpec(
    name="module",
    defaults=_defaults,
    block=BlockSpec(
        written=ModuleBlock,
        hint="write `module:` with `model`, `loss` and `data` as import paths (package.module:name)",
        reasons={"evaluate": "nothing is held out", "arguments": "the callable needs none"},
        examples={
            **dict.fromkeys(("model", "loss", "data", "evaluate"), "package.module:name"),
            "arguments": "{width: 32}",
        },
        checks=(_import_paths, _held_out),
    ),
    runs_code=lambda _: True,
    rows=RowSpec(chat=False),
    own_model=OwnModel(
        prepare=_prepare,
        instead={
            "model": "name the callable in `module.model`",
            "data": "name the callable in `module.data`",
            "evaluate.data": "name the callable in `module.evaluate`",
        },
        toy=_toy,
    ),
    exports=(),
    next_commands=lambda _job, _run: (),
)
