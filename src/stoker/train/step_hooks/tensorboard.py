"""TensorBoard events of a run, written with ``train.tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.runs.run_folder import StepMetrics
from stoker.train.hooks import Hook
from stoker.train.step_hooks.tracked_metrics import missing_package, of_evaluation, of_step


def tensorboard_hook(folder: Path, resumed: int) -> Hook:
    """Returns the hook that writes the metrics of steps and evaluations.

    Raises:
        UserError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing_package("tensorboard", "tensorboard") from error
    writer = SummaryWriter(str(folder), purge_step=resumed + 1 if resumed else None)

    def write(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def after_step(metrics: StepMetrics) -> None:
        write(of_step(metrics), metrics.step)

    def evaluated(step: int, figures: Mapping[str, Any]) -> None:
        write(of_evaluation(figures), step)

    return Hook(after_step=after_step, evaluated=evaluated)
