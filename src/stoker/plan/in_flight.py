"""Micro-batches in flight: how many of them a pipeline's process saves activations of (Narayanan et al., 2021)."""

from __future__ import annotations

from functools import lru_cache

from stoker.job.layout import ScheduleName
from stoker.plan.pipeline import schedule_order
from stoker.plan.setting import Setting


def in_flight(setting: Setting, stage: int) -> float:
    """Returns the most micro-batches whose activations the stage saves, counted as passes through all of its blocks."""
    layout = setting.layout
    if layout.pipeline == 1:
        return 1.0
    return _in_flight(layout.schedule, layout.pipeline, setting.micro_batches, setting.chunks)[stage]


@lru_cache(maxsize=65536)
def _in_flight(name: ScheduleName, processes: int, micro_batches: int, chunks: int) -> tuple[float, ...]:
    kept = schedule_order.in_flight(name, processes=processes, micro_batches=micro_batches, chunks=chunks)
    return tuple(sum(counts) / len(counts) for counts in kept)
