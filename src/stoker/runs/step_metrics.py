"""The metrics of a step, and their file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from stoker.files import no_link, write_all
from stoker.runs.json_lines import disk_errors, line_of
from stoker.runs.run_folder import RunFolder


@dataclass(frozen=True)
class StepMetrics:
    """One line of ``metrics.jsonl``.

    Attributes:
        loss: mean over the step's trained tokens (samples, for a module).
        grad_norm: L2 norm of the gradient before clipping.
        lr: learning rate of the step.
        tokens: tokens that went through the model.
        trained_tokens: number of items that the loss is a mean over: tokens with a loss; pairs, answers or samples in
            tasks whose loss is a mean over those.
        tokens_per_s: ``tokens / seconds``.
        memory_gib: peak memory so far, GiB: of the device, or of the process on a CPU.
        seconds: wall time of the step.
        time: when it ended, seconds since 1970.
        samples: consumed so far, over the whole run.
        first_sample: number of the step's first one; runs of earlier versions have none.
        data_seconds: time of waiting for samples, included in ``seconds``.
        stall: seconds that training waited for checkpoints since the step before.
        effective: productive step time over wall time, of the whole run so far.
        measures: further metrics of the task, by name; each is a field of the line.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    trained_tokens: int
    tokens_per_s: float
    memory_gib: float
    seconds: float
    time: float = 0.0
    samples: int = 0
    first_sample: int = 0
    data_seconds: float = 0.0
    stall: float = 0.0
    effective: float = 0.0
    measures: Mapping[str, float] = field(default_factory=dict)


class MetricsWriter:
    """Appends to ``metrics.jsonl``, a whole line at a time."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.metrics
        with disk_errors(self._path):
            self._file = open(self._path, "ab", buffering=0, opener=no_link)  # noqa: SIM115 -- see `close`

    def write(self, metrics: StepMetrics) -> None:
        """Appends a line.

        Raises:
            DiskFailed: the disk is full or cannot be written.
        """
        values = asdict(metrics)
        measures = values.pop("measures")
        with disk_errors(self._path):
            write_all(self._file, line_of({**values, **measures}).encode())

    def flush(self) -> None:
        """Syncs all lines to disk, so that a checkpoint never outlives the metrics before it."""
        with disk_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
