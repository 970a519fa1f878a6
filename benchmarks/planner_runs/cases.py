"""Runs as rows of a table: each becomes a setting, and each gets its prediction.

A row has the fields of a published measurement: the model's sizes, the GPU and how many, the degrees of the layout,
batch, precision, recomputation. What it does not state takes the default that `setting_of` names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, cast

from planner_runs.programs import program_of_row
from planner_runs.rows import Row, checked
from planner_runs.shapes import balanced, shape_of_row
from stoker.errors import Problem, UserError
from stoker.hardware.cluster import Cluster, cluster_of
from stoker.hardware.devices import DeviceKind, device_kind
from stoker.hardware.network import parse_network
from stoker.job.layout import SHARDS, Layout, Offload, Recompute, Shard
from stoker.plan.memory import STATES, Memory, Verdict, context_bytes, peak_memory, room, stage_memory, verdict_of
from stoker.plan.setting import Setting, Tuning, Work
from stoker.plan.speed import speed_of
from stoker.plan.step_time import step_time

GPU = "A100-80GB"  # where a row names none


@dataclass(frozen=True)
class Prediction:
    """What is written for a row; None where the row says too little."""

    row_id: Any
    memory_gib: float | None
    memory_upper_gib: float | None
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    verdict: Verdict | None
    group: str | None = None


def setting_of(row: Row) -> Setting:
    """The setting that a row describes.

    Defaults: one device, an A100 of 80 GB; degrees of 1, and what is left of the devices is data-parallel; no sharding
    (ZeRO-3 where ``fsdp`` is stated, over all of the data-parallel processes); 2,048 tokens a row; a micro-batch of one
    row; one micro-batch a step; no recomputation; 16-bit products; 1F1B, interleaved where there are several chunks;
    the network of the GPU's reference node; the conventions of the software that ``source`` or ``framework`` names.

    Raises:
        UserError: no device or no model can be made of it, or a number cannot be meant.
    """
    row = checked(row)
    gpus = row.get("num_gpus") or 1
    device = device_kind(str(row.get("gpu") or GPU))
    cluster = _cluster(row, device, gpus)
    tensor, pipeline, context = (row.get(key) or 1 for key in ("tp", "pp", "cp"))
    data = row.get("dp") or max(1, gpus // (tensor * pipeline * context))
    software = program_of_row(row)
    zero = row.get("zero_stage")
    shard: Shard = SHARDS[zero] if zero is not None else "zero3" if _is_said(row.get("fsdp")) else software.shard
    micro_batch = row.get("micro_batch") or 1
    chunks = row.get("vp") or 1
    recompute = str(row.get("recompute")).lower()
    recompute = "full" if recompute in ("true", "block") else recompute
    shape = shape_of_row(row)
    layout = Layout(
        data=data,
        shard=shard if data * context > 1 else "none",
        shard_size=_shard_size(row, data) if shard != "none" else 1,
        tensor=tensor,
        sequence=tensor > 1 and software.sequence,
        pipeline=pipeline,
        schedule="interleaved" if chunks > 1 else "1f1b",
        context=context,
        recompute=cast(Recompute, recompute) if recompute in ("none", "selective", "full") else software.recompute,
        offload=_offload(row),
        stages=balanced(shape, pipeline * chunks) if software.balanced and pipeline > 1 else None,
    )
    work = Work(
        shape,
        seq_len=row.get("seq_len") or software.seq_len,
        global_batch=row.get("global_batch") or micro_batch * data,
        precision=precision_of(row, device.name),
        tuning=_tuning(row),
    )
    expert = min(row.get("ep") or 1, gpus) if work.shape.mixture is not None else 1
    return Setting(work, cluster, layout, micro_batch, chunks=chunks, expert=expert, software=software)


def _is_said(value: object) -> bool:
    """Whether a field says yes, in one way or another."""
    return bool(value) and str(value).lower() not in ("false", "no", "none", "0", "off")


def _cluster(row: Row, device: DeviceKind, gpus: int) -> Cluster:
    network = row.get("interconnect")
    told = network if network and parse_network(str(network), device) is not None else None
    return cluster_of(device, gpus=gpus, network=told)


def _shard_size(row: Row, data: int) -> int:
    """Processes of one copy: all, unless a note names a smaller group."""
    group = re.search(r"shard group=(\d+)", str(row.get("notes") or ""))
    return min(data, int(group[1])) if group else data


def precision_of(row: Row, device: str) -> str:
    """Of the matrix products."""
    said = str(row.get("precision") or "").lower()
    for precision, names in (
        ("fp4", ("fp4",)),
        ("fp8", ("fp8",)),
        ("fp32", ("fp32", "float32", "tf32")),
        ("bf16", ("bf16",)),
    ):
        if any(said.startswith(name) or name in said.split("(")[0] for name in names):
            return precision
    return "fp16" if device.startswith(("V100", "T4")) else "bf16"


def _offload(row: Row) -> Offload:
    """Weights too where they are sharded (FSDP), the optimizer's states only where DeepSpeed does it."""
    if "cpu offload" not in f"{row.get('model_name')} {row.get('notes')}".lower():
        return "none"
    return "params" if row.get("zero_stage") == 3 else "optimizer"


def _says(row: Row, words: str) -> bool:
    return words in str(row.get("model_name") or "").lower()


def _tuning(row: Row) -> Tuning:
    if _says(row, "qlora"):
        return "qlora"
    return "lora" if _says(row, "lora") else "full"


def predict(row: Row) -> Prediction:
    """What the planner says of a row.

    MFU is tokens/s/GPU x FLOP per token by the PaLM convention (6 N + 12 L H Q T, all attention, nothing computed
    again; 4 N where only adapters are trained) over the device's peak in the row's precision.
    """
    setting = setting_of(row)
    _, memory = (0, stage_memory(setting, 0)) if program_of_row(row).first_stage else peak_memory(setting)
    seconds = step_time(setting).total
    speed = speed_of(setting, seconds)
    peak, upper = _as_counted(memory, setting, str(row.get("memory_metric") or ""))
    return Prediction(
        row.get("row_id"),
        peak,
        upper,
        seconds,
        speed.tokens_per_s_per_gpu,
        speed.mfu,
        verdict_of(memory.peak, memory.upper, room(setting.cluster))
        if len(setting.stages) <= setting.shape.layers  # else there are stages with nothing in them
        else "DOES NOT FIT",
        row.get("group"),
    )


def _as_counted(memory: Memory, setting: Setting, metric: str) -> tuple[float, float]:
    """The estimate and its bound in GiB, as the row's source counts: nvidia-smi (MiB) counts the device's context, too;
    a formula may count the model's states only, in GB."""
    if "states only" in metric:
        states = sum(memory.parts.get(part, 0.0) for part in STATES) / 1e9
        return states, states
    outside = context_bytes(setting.cluster) if "MiB" in metric else 0.0
    return (memory.peak + outside) / 2**30, (memory.upper + outside) / 2**30


def predict_all(rows: Iterable[tuple[int, Row]], *, file: str) -> tuple[list[Prediction], list[Problem]]:
    """(a prediction for each row, what is wrong with those that have none).

    Raises:
        UserError: no row can be predicted.
    """
    predictions: list[Prediction] = []
    problems: list[Problem] = []
    for number, row in rows:
        try:
            predictions.append(predict(row))
        except (UserError, ArithmeticError) as error:
            problem = error.problems[0] if isinstance(error, UserError) else Problem(f"has no result: {error}")
            problems.append(Problem(problem.message, problem.suggestion, file=file, line=number))
            predictions.append(Prediction(row.get("row_id"), *(None,) * 6, row.get("group")))
    if problems and len(problems) == len(predictions):
        raise UserError(*problems)
    return predictions, problems


def as_json(prediction: Prediction) -> str:
    """One line."""
    found = asdict(prediction)
    found.pop("group")
    return json.dumps({key: round(value, 6) if isinstance(value, float) else value for key, value in found.items()})
