"""TensorBoard events of a run, written with ``train.tensorboard``."""

from __future__ import annotations

from pathlib import Path

from stoker.train.hooks import Hook
from stoker.train.step_hooks.tracked_metrics import missing_package, tracking_hook


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

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return tracking_hook(write)
