"""Checks for impossible layouts that need no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from stoker.errors import Problem
from stoker.job.blocks.parallel_block import ParallelBlock
from stoker.job.conflicts.conflict_view import CannotTellError, View
from stoker.job.layout import SPLIT_BACKWARD
from stoker.job.resolution.batch_solver import BatchError, BatchTriangle, divisors
from stoker.job.resolution.batch_triangle import TRIANGLE, pipeline_of, triangle_of

AXES = ("tensor", "pipeline", "context")
COMPRESS_RANK = ParallelBlock.model_fields["compress_rank"].default
# Keys without effect while the size of their axis is one, and their values that have no effect.
AXIS_KEYS: dict[str, dict[str, object]] = {
    "tensor": {"sequence": False, "async_tensor": False},
    "pipeline": {"schedule": None, "stages": None},
    "context": {"context_by": None},
}


class _Asked:
    """The block ``parallel`` of a job under judgement: asking for a key that is wrong raises CannotTellError."""

    def __init__(self, view: View) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return self._view.value(f"parallel.{name}")


def _parts(view: View) -> ParallelBlock:
    return cast(ParallelBlock, _Asked(view))


def solved_batch(view: View) -> BatchTriangle:
    """Solves the batch triangle; raises CannotTellError if the planner is to choose a corner, or one is wrong."""
    if view.document.planned:
        raise CannotTellError("parallel.data")
    for key in TRIANGLE:
        view.value(key)
    try:
        return triangle_of(view.job)
    except BatchError:
        raise CannotTellError("parallel.data") from None


def data_of(view: View) -> int:
    """Returns the data-parallel size; raises CannotTellError if it is not known yet."""
    data = _parts(view).data
    return solved_batch(view).data_parallel if data == "auto" else data


def batch_of(view: View) -> int:
    """Returns the samples of a step; raises CannotTellError if they are not known yet."""
    batch: int | str = view.value("train.batch")
    return batch if isinstance(batch, int) else solved_batch(view).batch


def copies_of(view: View) -> int:
    """Copies of the model as they will be."""
    parts = _parts(view)
    if parts.shard == "none":
        return data_of(view)
    return 1 if parts.shard_size == "auto" else data_of(view) // parts.shard_size


def _keys_without_axis(axis: str, view: View) -> Iterator[Problem]:
    parts = _parts(view)
    if getattr(parts, axis) > 1:
        return
    for name, idle in AXIS_KEYS[axis].items():
        key = f"parallel.{name}"
        if view.given(key) and getattr(parts, name) != idle:
            message = f"`{name}` has no effect without `{axis}`"
            yield from view.at_each([key], message, f"also write `{axis}: 2` or more, or remove it")


def _nothing_to_shard(view: View) -> Iterator[Problem]:
    parts = _parts(view)
    if parts.shard == "none":
        if parts.shard_size not in ("auto", 1):
            message = f"`shard_size: {parts.shard_size}` has no effect without `shard`"
            hint = "also write `shard: zero3` (or zero1, zero2), or remove it"
            yield from view.at_each(["parallel.shard_size", "parallel.shard"], message, hint)
    elif data_of(view) == 1 and parts.context == 1:
        message = f"`shard: {parts.shard}` spreads over the data-parallel processes, and there is one"
        hint = "also write `data: 2` or more, or remove `shard`"
        yield from view.at_each(["parallel.shard", "parallel.data"], message, hint)
    elif parts.shard_size == 1 and parts.context == 1:
        message = f"`shard_size: 1` leaves nothing to shard, and `shard` is {parts.shard}"
        sizes = " or ".join(map(str, divisors(data_of(view))[1:]))
        yield from view.at_each(
            ["parallel.shard_size", "parallel.shard"], message, f"write {sizes}, or `shard: none` without `shard_size`"
        )


def _shard_size(view: View) -> Iterator[Problem]:
    parts, data = _parts(view), data_of(view)
    size = parts.shard_size
    if parts.shard == "none" or size == "auto" or data % size == 0 or (data == 1 and parts.context == 1):
        return
    near = sorted(divisors(data), key=lambda divisor: (abs(divisor - size), -divisor))
    hint = f"write {near[0]}, or `data: {-(-data // size) * size}`"
    message = f"`shard_size: {size}` does not divide `data: {data}`, and every replica must be a whole copy"
    yield from view.at_each(["parallel.shard_size", "parallel.data"], message, hint)


def _prefetch(view: View) -> Iterator[Problem]:
    parts = _parts(view)
    if parts.prefetch == 1:
        return
    if parts.shard != "zero3":
        message = f"`prefetch: {parts.prefetch}` has no effect without `shard: zero3`"
        keys = ["parallel.prefetch", "parallel.shard"]
        yield from view.at_each(keys, message, "also write `shard: zero3`, or remove it")
    elif parts.pipeline > 1:
        message = (
            f"`prefetch: {parts.prefetch}` has no effect with `pipeline`, whose stages keep their weights gathered"
        )
        yield from view.at_each(["parallel.prefetch", "parallel.pipeline"], message, "remove it")


def _stages(view: View) -> Iterator[Problem]:
    parts = _parts(view)
    pipeline = pipeline_of(parts)
    if parts.pipeline == 1 or parts.stages == "auto" or len(parts.stages) == pipeline.stage_count:
        return
    each = f" ({pipeline.stages_per_process} a process)" if pipeline.stages_per_process > 1 else ""
    message = (
        f"`stages` has {len(parts.stages)} numbers, and `pipeline: {parts.pipeline}` with `{pipeline.schedule}` has "
        f"{pipeline.stage_count} stages{each}"
    )
    hint = f"write the blocks of each of the {pipeline.stage_count} stages, or auto"
    yield from view.at_each(["parallel.stages", "parallel.pipeline", "parallel.schedule"], message, hint)


def _async_tensor(view: View) -> Iterator[Problem]:
    parts = _parts(view)
    if not parts.async_tensor or parts.tensor == 1:
        return
    key = "parallel.async_tensor"
    if parts.sequence is False:
        message = "`async_tensor` overlaps the collectives of `sequence`, which is false"
        yield from view.at_each([key, "parallel.sequence"], message, "remove one of them")
    if view.value("train.compile") is not True:
        message = "`async_tensor` is a pass of the compiler, and blocks are not compiled"
        keys = [key, "train.compile"]
        yield from view.at_each(keys, message, "also write `compile: true` under `train:`, or remove it")
    if view.value("train.float8") != "none":
        message = "`async_tensor` is for products in 16 or 32 bits, and `float8` has others"
        yield from view.at_each([key, "train.float8"], message, "write `float8: none`, or remove `async_tensor`")


def _split_backward(view: View) -> Iterator[Problem]:
    parts = _parts(view)
    schedule = pipeline_of(parts).schedule
    if parts.pipeline == 1 or schedule not in SPLIT_BACKWARD:
        return
    halves = f"`schedule: {schedule}` runs the backward pass of a block in two halves"
    hint = "write `schedule: interleaved` or 1f1b"
    if parts.recompute != "none":
        message = f"{halves}, and `recompute: {parts.recompute}` can compute it again for one only"
        yield from view.at_each(["parallel.schedule", "parallel.recompute"], message, f"{hint}, or `recompute: none`")
    if view.value("train.compile") is True:
        message = f"{halves}, and a compiled block has one backward pass"
        keys = ["parallel.schedule", "train.compile"]
        yield from view.at_each(keys, message, f"{hint}, or `compile: false`")


def _offload(view: View) -> Iterator[Problem]:
    parts = _parts(view)
    if parts.offload == "params" and parts.shard != "zero3":
        message = (
            f"`offload: params` fetches weights when they are used, but `shard: {parts.shard}` always keeps "
            "them on the device"
        )
        hint = "also write `shard: zero3`, or use `offload: optimizer`"
        yield from view.at_each(["parallel.offload", "parallel.shard"], message, hint)
    if parts.offload == "activations" and parts.pipeline > 1:
        message = (
            "`offload: activations` is for blocks that run in a row, and `pipeline` has several micro-batches in flight"
        )
        hint = "write `offload: none` with `recompute: full`, or remove `pipeline`"
        yield from view.at_each(["parallel.offload", "parallel.pipeline"], message, hint)


def _expert(view: View) -> Iterator[Problem]:
    parts = _parts(view)
    if parts.expert not in ("auto", parts.tensor):
        message = (
            f"`expert: {parts.expert}` must equal `tensor`, as experts are spread over its processes, and `tensor` is "
            f"{parts.tensor}"
        )
        hint = f"remove it, or write `tensor: {parts.expert}` as well"
        yield from view.at_each(["parallel.expert", "parallel.tensor"], message, hint)


def _repeated_devices(view: View) -> Iterator[Problem]:
    devices = _parts(view).devices
    if devices == "auto":
        return
    for index, device in enumerate(devices):
        if device in devices[:index]:
            place = ("parallel", "devices", index)
            yield view.document.problem(place, f"`devices` names {device} twice", "name each device once")


def _number_of_devices(view: View) -> Iterator[Problem]:
    parts = _parts(view)
    if parts.devices == "auto":
        return
    named, others = len(parts.devices), parts.tensor * parts.pipeline * parts.context
    keys = ["parallel.devices", "parallel.data", *(f"parallel.{axis}" for axis in AXES)]
    if parts.data == "auto":
        if named % others:
            counts = " or ".join(str(n) for n in (named // others * others, (named // others + 1) * others) if n)
            message = f"`devices` lists {named}, which is not a multiple of tensor x pipeline x context = {others}"
            yield from view.at_each(keys, message, f"name {counts} devices")
    elif named != parts.data * others:
        product = f"{parts.data} x {parts.tensor} x {parts.pipeline} x {parts.context}"
        message = (
            f"`devices` lists {named}, but data x tensor x pipeline x context = {product} is "
            f"{parts.data * others} processes"
        )
        hint = f"name {parts.data * others} devices" + (f", or write `data: {named // others}`" * (named % others == 0))
        yield from view.at_each(keys, message, hint)


def _own_model(view: View) -> Iterator[Problem]:
    parts, task = _parts(view), view.task
    for axis in () if task.text else AXES:
        size = getattr(parts, axis)
        if size > 1:
            message = (
                f"`{axis}: {size}` needs a family's facts (matrices, blocks, attention), and `task: {task.name}` has "
                "none"
            )
            hint = f"write `data: {size}` instead, with `shard: zero3` to spread the weights"
            yield from view.at_each([f"parallel.{axis}"], message, hint)


def _quantised(view: View) -> Iterator[Problem]:
    parts = _parts(view)
    quantised = view.value("tune.method") == "qlora" or view.value("model.quantise") not in (None, "none")
    if not quantised:
        return
    keys = ["model.quantise", "tune.method"]
    for name in (name for name in ("tensor", "pipeline") if getattr(parts, name) > 1):
        message = (
            f"`{name}: {getattr(parts, name)}` cuts the model into pieces, and a quantised base is held in blocks that "
            "cannot be cut"
        )
        hint = f"remove `{name}` and write `data`, or write `tune: lora` on a base that is not quantised"
        yield from view.at_each([f"parallel.{name}", *keys], message, hint)
    if parts.offload == "params":
        message = (
            "`offload: params` copies the weights of each block to the device and back, which a quantised base does "
            "not support"
        )
        yield from view.at_each(["parallel.offload", *keys], message, "write `offload: optimizer` or none")
    if view.value("train.precision") == "fp64":
        message = "a quantised base cannot compute in `precision: fp64`"
        yield from view.at_each(
            ["train.precision", *keys], message, "write `tune: lora` on a base that is not quantised"
        )


def _fp16(view: View) -> Iterator[Problem]:
    if view.value("train.precision") == "fp16":
        for name, why in without_loss_scale(_parts(view)):
            if view.is_recorded(f"parallel.{name}"):  # by an earlier version: also loaded to be evaluated
                continue
            message = f"`precision: fp16` scales the loss, and {why}"
            hint = f"write `precision: bf16` or fp32, or another `{name}`"
            yield from view.at_each(["train.precision", f"parallel.{name}"], message, hint)


def without_loss_scale(parallel: ParallelBlock) -> Iterator[tuple[str, str]]:
    """Yields the keys of a layout that fp16 cannot have, and why."""
    if parallel.pipeline > 1:
        yield "pipeline", "the stages of a pipeline would skip overflown steps one by one"
    if parallel.offload == "params":
        yield "offload", "gradients on the host could be unscaled before the scale arrives"
    if parallel.compress == "powersgd":
        yield "compress", "PowerSGD's errors of one scale would be added to gradients of another"


def _compressed(view: View) -> Iterator[Problem]:
    parts = _parts(view)
    kind = parts.compress
    if kind != "powersgd" and view.given("parallel.compress_rank") and parts.compress_rank != COMPRESS_RANK:
        message = "`compress_rank` has no effect without `compress: powersgd`"
        yield from view.at_each(["parallel.compress_rank"], message, "also write `compress: powersgd`, or remove it")
    if kind == "none":
        return
    keys = ["parallel.compress"]
    why = {"shard": parts.shard != "none" and kind == "powersgd", "pipeline": parts.pipeline > 1}
    for name in (name for name, there in why.items() if there):
        message = f"`compress: {kind}` needs a whole copy of the model in each process, and `{name}` splits it"
        yield from view.at_each([*keys, f"parallel.{name}"], message, f"remove `compress`, or `{name}`")
    if parts.shard == "zero1" and kind == "bf16":
        message = "`shard: zero1` adds up the gradients of micro-batches in the type in which they are sent"
        yield from view.at_each(
            [*keys, "parallel.shard"], message, "write `shard: zero2` or zero3, or remove `compress`"
        )
    if view.task.rows.prompts:
        message = f"`compress: {kind}` is for tasks on rows, and `task: {view.task.name}` learns from answers"
        yield from view.at_each(keys, message, "remove it")
    if data_of(view) == 1 and parts.context == 1:
        message = f"`compress: {kind}` has no effect on one copy of the model"
        yield from view.at_each(keys, message, "also write `data: 2` or more, or remove it")


LAYOUT_CHECKS: tuple[Callable[[View], Iterator[Problem]], ...] = (
    *(partial(_keys_without_axis, axis) for axis in AXES),
    _nothing_to_shard, _shard_size, _prefetch, _stages, _async_tensor, _split_backward, _offload, _expert,
    _repeated_devices, _number_of_devices, _own_model, _quantised, _fp16, _compressed,
)  # fmt: skip
