"""Reads a row of a table: the settings that it allows, and the phrases that were not understood."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import cast

from planner_runs.phrases import Numbers, Recomputed, numbers_of, recomputed, sharing, zero_stage
from planner_runs.program import Program
from planner_runs.programs import program_of_row
from planner_runs.rows import Row, checked
from planner_runs.shapes import balanced, shape_of_row
from stoker.hardware.machines.cluster import Cluster, cluster_of
from stoker.hardware.machines.device_catalogue import DeviceKind
from stoker.hardware.machines.device_names import device_kind
from stoker.hardware.machines.network import describes_node, parse_network
from stoker.job.layout import SHARDS, Layout, Offload, Shard
from stoker.plan.memory.memory_formulas import allocatable_bytes, peak_memory
from stoker.plan.setting import Setting, TrainingWork, Tuning

GPU = "A100-80GB"  # where a row names none
_RECOMPUTED: tuple[Recomputed, ...] = ("none", "selective", "full")
_EIGHT_BITS = re.compile(r"8[ -]?bit[ -]*(?:paged)?[ -]*(?:adam|optim)|adamw?_?8bit", re.I)
_PAGED = re.compile(r"paged[ _-]?(?:adam|optim)", re.I)


@dataclass(frozen=True)
class Reading:
    """The meaning of a row.

    Attributes:
        settings: those that it allows: first with the defaults for what it does not state, then the others.
        notes: phrases that were not understood, and what was taken instead.
    """

    settings: tuple[Setting, ...]
    notes: tuple[str, ...]


def reading_of(row: Row) -> Reading:
    """The meaning of a row.

    Defaults: one device, an A100 of 80 GB; degrees of 1, and what is left of the devices is data-parallel; 2,048
    tokens a row; a micro-batch of one row; one micro-batch a step; 16-bit products; 1F1B, interleaved where there are
    several chunks; the network of the GPU's reference node; the conventions of the program that ``source`` or
    ``framework`` names. Recomputation, sharding and offload that are not stated stay open: first what the program does
    by default, then the rest of what it can do.

    Raises:
        UserError: no device or no model can be made of it, or a number cannot be meant.
    """
    row = checked(row)
    notes: list[str] = []
    gpus = row.get("num_gpus") or 1
    device = device_kind(str(row.get("gpu") or GPU))
    cluster, unread = _cluster(row, device, gpus)
    notes += unread
    tensor, pipeline, context = (row.get(key) or 1 for key in ("tp", "pp", "cp"))
    data = row.get("dp") or max(1, gpus // (tensor * pipeline * context))
    numbers = numbers_of(row.get("precision"))
    program = _with_numbers(program_of_row(row), numbers, row)
    precision = _precision(numbers, row, device, notes)
    again, unread = recomputed(row.get("recompute"))
    notes += unread
    shared = sharing(row.get("fsdp"))
    notes += shared.notes
    micro_batch = row.get("micro_batch") or 1
    chunks = row.get("vp") or 1
    shape = shape_of_row(row)
    zero, unread = zero_stage(row.get("zero_stage"))
    notes += unread
    if zero is None:
        zero = shared.zero or None  # ``fsdp: false`` says nothing of the other stages
    open_shards = (program.shard,) if zero is None else (SHARDS[zero],)
    if zero is None and data * context > 1 and program.shard == "none":
        open_shards += ("zero1",)
    own = next(shard for shard in open_shards)
    layout = Layout(
        data=data,
        shard=own if data * context > 1 else "none",
        tensor=tensor,
        sequence=tensor > 1 and _sequence(row, program),
        pipeline=pipeline,
        schedule="interleaved" if chunks > 1 else "1f1b",
        context=context,
        recompute=again or program.recompute,
        offload=_offload(row, zero),
        stages=balanced(shape, pipeline * chunks) if program.balanced and pipeline > 1 else None,
    )
    layout = replace(layout, shard_size=_shard_size(row, data, shared.group, cluster) if layout.zero else 1)
    work = TrainingWork(
        shape,
        seq_len=row.get("seq_len") or program.seq_len,
        global_batch=row.get("global_batch") or micro_batch * data,
        precision=precision,
        tuning=_tuning(row),
    )
    expert = min(row.get("ep") or 1, gpus) if work.shape.mixture is not None else 1
    first = Setting(work, cluster, layout, micro_batch, expert=expert, software=program, stages_per_process=chunks)
    if program.paged and gpus == 1 and work.tuning == "full" and numbers.moments is None:
        program = replace(program, states=0)
        first = replace(first, software=program)
        if peak_memory(first)[1].peak > allocatable_bytes(cluster):
            first = replace(first, software=replace(program, gradients=0))
    open_recompute = (layout.recompute, *_RECOMPUTED) if again is None else (layout.recompute,)
    open_offload = (layout.offload,)
    if layout.offload == "none" and program.offload != "none" and "offload=false" not in _remarks(row):
        open_offload += (program.offload,)
    return Reading(_all_of(first, open_recompute, open_shards, open_offload), tuple(notes))


def _all_of(
    first: Setting, recompute: tuple[Recomputed, ...], shards: tuple[Shard, ...], offload: tuple[Offload, ...]
) -> tuple[Setting, ...]:
    """A setting with every choice of what is open, those that cost least time first."""
    found: dict[Setting, None] = {}
    for off in offload:
        for shard in shards if first.layout.zero or first.layout.data * first.layout.context > 1 else shards[:1]:
            for again in recompute:
                layout = replace(first.layout, recompute=again, offload=off)
                if shard != layout.shard and layout.data * layout.context > 1:
                    layout = replace(layout, shard=shard, shard_size=layout.data)
                found[replace(first, layout=layout)] = None
    return tuple(found)


def _remarks(row: Row) -> str:
    """Model name and notes in lower case."""
    return " ".join(str(row.get(key) or "") for key in ("model_name", "notes")).lower()


def _cluster(row: Row, device: DeviceKind, gpus: int) -> tuple[Cluster, list[str]]:
    said = str(row.get("interconnect") or "")
    network = parse_network(said, device)
    cluster = cluster_of(device, gpus=gpus, network=network)
    if said and network is None and not describes_node(said):
        return cluster, [f"`interconnect`: `{said}` is not known, taken as in {cluster.name}"]
    return cluster, []


def _shard_size(row: Row, data: int, group: int | str | None, cluster: Cluster) -> int:
    """Processes of one copy: all, unless a smaller group is named."""
    noted = re.search(r"shard group=(\d+)", str(row.get("notes") or ""))
    if noted:
        return min(data, int(noted[1]))
    if group == "node":
        group = max(1, cluster.per_node // ((row.get("tp") or 1) * (row.get("cp") or 1)))
    return min(data, cast(int, group)) if group is not None else data


def _sequence(row: Row, program: Program) -> bool:
    """Whether sequence parallelism goes with tensor parallelism."""
    remarks = _remarks(row)
    if re.search(r"(?:no|without) sequence[ -]parallel", remarks):
        return False
    return program.sequence or "sequence parallel" in remarks


def _precision(numbers: Numbers, row: Row, device: DeviceKind, notes: list[str]) -> str:
    """Precision of the matrix products: 16 bits by default."""
    half = "bf16" if "bf16" in device.peak_tflops else "fp16"
    said = row.get("precision")
    if numbers.notes:
        unread = ", ".join(f"`{note}`" for note in numbers.notes)
        taken = "" if numbers.products else f", products taken as {half}"
        notes.append(f"`precision`: {unread} of `{said}` is not known{taken}")
    return half if numbers.products in (None, "16bit") else numbers.products


def _with_numbers(program: Program, numbers: Numbers, row: Row) -> Program:
    """The program with the types that a row states."""
    moments = numbers.moments
    remarks = f"{_remarks(row)} {row.get('precision')}"
    if moments is None and _EIGHT_BITS.search(remarks):
        moments = 1
    weights = program.weights if numbers.weights is None else int(numbers.weights)
    if numbers.master is not None:
        master = numbers.master
    else:  # what the program keeps beside two moments
        master = 4.0 if program.weights < 4 <= program.states / 3 else 0.0
        master = 0.0 if weights >= 4 else master
    states: float = program.states
    if moments is not None or numbers.weights is not None or numbers.master is not None:
        each = moments if moments is not None else 4.0 if program.states >= 8 else program.states / 2
        states = master + 2 * each
    if _PAGED.search(remarks):  # on the host, as far as the device has no room
        states = master
    gradients = program.gradients
    if numbers.gradients is not None and program.gradients:
        gradients = max(program.gradients, 4) if numbers.gradients >= 4 else int(numbers.gradients)
    return replace(program, weights=weights, states=int(states), gradients=gradients)


def _offload(row: Row, zero: int | None) -> Offload:
    """Weights too where they are sharded (FSDP), the optimizer's states only where DeepSpeed does it."""
    if not re.search(r"cpu[ _-]?offload(?!=false)", _remarks(row)) or "act_cpu_offload" in _remarks(row):
        return "none"
    return "params" if zero == 3 else "optimizer"


def _tuning(row: Row) -> Tuning:
    name = str(row.get("model_name") or "").lower()
    if "qlora" in name:
        return "qlora"
    return "lora" if "lora" in name else "full"
