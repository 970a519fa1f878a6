"""The batches of a run, each laid out in a background thread while the step before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch

from stoker.hardware.process.openmp import without_openmp
from stoker.train.engine import Engine
from stoker.train.faults.skipped_samples import Span
from stoker.train.task import Part, Task


class Batches:
    """Hands out the parts of this process, step by step, on the device.

    A batch depends on its samples alone. A batch that was laid out ahead is dropped if the run takes other samples
    next, as it does after a rollback.

    Args:
        batch, micro_batch: samples of a step over all processes, and of one forward pass.
    """

    def __init__(self, task: Task, engine: Engine, device: torch.device, *, batch: int, micro_batch: int) -> None:
        self._task, self._engine, self._device = task, engine, device
        self._batch, self._micro_batch = batch, micro_batch
        if device.type == "cuda":  # the current one, unless a number is given
            self._gpu = torch.cuda.current_device() if device.index is None else device.index
        torch.get_num_threads()  # fixes this thread's own count before the other thread sets its own
        self._thread = ThreadPoolExecutor(1, "batches", self._begin_thread)
        self._ahead: dict[Span, Future[list[Part]]] = {}

    def take(self, span: Span) -> list[Part]:
        """Returns the parts of the step with these samples, waiting until they are laid out.

        Raises:
            Exception: raised while these samples were laid out.
        """
        if self._task.lays_out_ahead:
            laid_out = self._ahead.pop(span, None) or self._thread.submit(self._lay_out, span)
            parts = laid_out.result()
        else:
            parts = self._lay_out(span)
        return parts if self._device.type == "cpu" else [part.to(self._device) for part in parts]

    def lay_out_ahead(self, spans: Sequence[Span]) -> None:
        """Queues the parts of the next steps; queued batches with other samples are dropped."""
        if self._task.lays_out_ahead:
            laid_out = self._ahead
            self._ahead = {span: laid_out.get(span) or self._thread.submit(self._lay_out, span) for span in spans}

    def coming(self, span: Span) -> list[Part]:
        """Returns the parts of a step queued by `lay_out_ahead`, on the host, waiting until they are laid out."""
        return self._ahead[span].result()

    def _lay_out(self, span: Span) -> list[Part]:
        first, last = self._engine.share(*span, self._batch)
        starts = range(first, last, self._micro_batch)
        parts = [part for start in starts for part in self._task.parts(start, min(start + self._micro_batch, last))]
        # From page-locked memory a copy to a GPU does not make the host wait.
        return [part.pinned() for part in parts] if self._device.type == "cuda" else parts

    def _begin_thread(self) -> None:
        without_openmp()  # the step uses the cores
        if self._device.type == "cuda":  # the current device is set per thread
            torch.cuda.set_device(self._gpu)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread and drops its batches."""
        self._thread.shutdown(cancel_futures=True)
        self._ahead = {}
