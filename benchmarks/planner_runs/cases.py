"""Runs as rows of a table: each becomes a setting, and each gets its prediction.

A row has the fields of a published measurement: the model's sizes, the GPU and how many, the degrees of the layout,
batch, precision, recomputation. What it does not state takes the defaults that `reading_of` names, or widens the
verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from planner_runs.memory import program_of
from planner_runs.reading import reading_of
from planner_runs.rows import Row
from stoker.errors import Problem, UserError
from stoker.plan.memory.memory_formulas import (
    STATES,
    Memory,
    Verdict,
    allocatable_bytes,
    context_bytes,
    peak_memory,
    stage_memory,
    verdict_of,
)
from stoker.plan.setting import Setting
from stoker.plan.time.speed import speed_of
from stoker.plan.time.step_time import step_time

CROWDED = 0.88  # of a device's memory, from which on it is nearly full


@dataclass(frozen=True)
class Prediction:
    """Prediction for a row; None where the row says too little.

    Attributes:
        notes: phrases of the row that were not understood, and what was taken instead.
    """

    row_id: Any
    memory_gib: float | None
    memory_upper_gib: float | None
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    verdict: Verdict | None
    group: str | None = None
    notes: tuple[str, ...] = ()


def setting_of(row: Row) -> Setting:
    """The setting that is predicted for a row, with the defaults for what it leaves open.

    Raises:
        UserError: no device or no model can be made of it, or a number cannot be meant.
    """
    return reading_of(row).settings[0]


def predict(row: Row) -> Prediction:
    """Prediction for a row.

    Where settings that a row does not state decide whether it fits, the verdict is AT RISK. MFU is tokens/s/GPU x FLOP
    per token by the PaLM convention (6 N + 12 L H Q T, all attention, nothing computed again; 4 N where only adapters
    are trained) over the device's peak in the row's precision.
    """
    reading = reading_of(row)
    setting, memories = reading.settings[0], [memory_of(each) for each in reading.settings]
    verdicts = {verdict_on(each, memory) for each, memory in zip(reading.settings, memories, strict=True)}
    seconds = seconds_of(setting, memories[0])
    speed = speed_of(setting, seconds)
    peak, upper = _as_counted(memories[0], setting, str(row.get("memory_metric") or ""))
    return Prediction(
        row.get("row_id"),
        peak,
        upper,
        seconds,
        speed.tokens_per_s_per_gpu,
        speed.mfu,
        verdicts.pop() if len(verdicts) == 1 else "AT RISK",
        row.get("group"),
        reading.notes,
    )


def verdict_on(setting: Setting, memory: Memory) -> Verdict:
    """Whether the fullest stage fits, and every stage has a block."""
    if len(setting.stages) > setting.shape.layers:
        return "DOES NOT FIT"
    return verdict_of(memory.peak, bound(setting, memory), allocatable_bytes(setting.cluster))


def memory_of(setting: Setting) -> Memory:
    """Memory of the fullest stage, or of the stage that the program logs."""
    return stage_memory(setting, 0) if program_of(setting).first_stage else peak_memory(setting)[1]


def seconds_of(setting: Setting, memory: Memory) -> float:
    """Seconds of a step, with what a nearly full device costs."""
    layout, device = setting.layout, setting.cluster.device
    full = memory.peak > CROWDED * device.memory_gib * 2**30
    crowded = full and layout.pipeline > 1 and layout.data > 1
    return step_time(setting).total + program_of(setting).crowded * setting.micro_batches * crowded


def bound(setting: Setting, memory: Memory) -> float:
    """Upper bound of the memory, wider for programs without published readings."""
    return memory.upper * (1 + program_of(setting).unverified)


def _as_counted(memory: Memory, setting: Setting, metric: str) -> tuple[float, float]:
    """The estimate and its bound in GiB, as the row's source counts: nvidia-smi (MiB) counts the device's context, too;
    a formula may count the model's states only, in GB."""
    if "states only" in metric:
        states = sum(memory.parts.get(part, 0.0) for part in STATES) / 1e9
        return states, states
    outside = context_bytes(setting.cluster) if "MiB" in metric or "smi" in metric.lower() else 0.0
    return (memory.peak + outside) / 2**30, (bound(setting, memory) + outside) / 2**30


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
    """One line; ``notes`` only where there are any."""
    found = asdict(prediction)
    found.pop("group")
    if not prediction.notes:
        found.pop("notes")
    return json.dumps({key: round(value, 6) if isinstance(value, float) else value for key, value in found.items()})
