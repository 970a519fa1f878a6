"""Metrics of a run's steps, written by its first process."""

from __future__ import annotations

import time

from stoker.hardware.process_device import Device
from stoker.runs.goodput import RunningGoodput
from stoker.runs.run_folder import RunFolder
from stoker.runs.step_metrics import MetricsWriter, StepMetrics
from stoker.train.records.run_cache_stats import RunCacheStats
from stoker.train.step import StepResult


class MetricsLog:
    """Computes the metrics of each step and, between `open` and `close`, appends them to ``metrics.jsonl``."""

    def __init__(self, folder: RunFolder, device: Device) -> None:
        self._folder, self._device = folder, device
        self._writer: MetricsWriter | None = None
        self._effective: RunningGoodput | None = None
        self.cache: RunCacheStats | None = None  # set when the loop starts

    def open(self) -> None:
        """Starts writing."""
        self._writer, self._effective = MetricsWriter(self._folder), RunningGoodput(self._folder)

    def add(self, result: StepResult, *, samples: int, stall: float) -> StepMetrics:
        """Returns the metrics of a step, and writes them in the process that writes.

        Args:
            samples: samples consumed so far.
            stall: seconds that training waited for checkpoints since the previous step.
        """
        productive = result.seconds - result.data_seconds if result.taken else 0.0
        metrics = StepMetrics(
            step=result.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.counts.tokens,
            trained_tokens=result.counts.targets,
            tokens_per_s=result.counts.tokens / result.seconds,
            memory_gib=self._device.peak_memory(),
            seconds=result.seconds,
            time=round(time.time(), 3),
            samples=samples,
            first_sample=result.span[0],
            data_seconds=result.data_seconds,
            stall=stall,
            effective=self._effective.after(productive) if self._effective is not None else 0.0,
            measures={**result.measures, **(self.cache.measures() if self.cache is not None else {})},
        )
        if self._writer is not None:
            self._writer.write(metrics)
        return metrics

    def flush(self) -> None:
        """Flushes everything to disk, so that a checkpoint never outlives the metrics before it."""
        if self._writer is not None:
            self._writer.flush()

    def go_back(self, step: int) -> None:
        """Moves the metrics of the steps after ``step``, which are repeated, out of the file."""
        if self._writer is not None:
            self._writer.close()
            self._folder.forget_after(step)
            self.open()

    def close(self) -> None:
        """Stops writing."""
        if self._writer is not None:
            self._writer.close()
