"""TensorBoard events of a run, written with ``train.tensorboard``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stoker.errors import UserError
from stoker.runs.run_folder import StepMetrics


def tensorboard_writer(folder: Path, resumed: int) -> Callable[[StepMetrics], None]:
    """Returns a function that writes each step's metrics.

    Raises:
        UserError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("train.tensorboard needs the package tensorboard: pip install 'stoker[tensorboard]'") from error
    writer = SummaryWriter(str(folder), purge_step=resumed + 1 if resumed else None)

    def write(metrics: StepMetrics) -> None:
        for name in ("loss", "grad_norm", "lr", "tokens_per_s", "memory_gib"):
            writer.add_scalar(f"train/{name}", getattr(metrics, name), metrics.step)
        for name, value in metrics.measures.items():
            writer.add_scalar(f"train/{name}", value, metrics.step)
        writer.flush()

    return write
