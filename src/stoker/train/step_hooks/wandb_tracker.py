"""Metrics of a run in Weights & Biases, with ``train.wandb``.

Account, server and mode are the package's own settings, such as ``WANDB_ENTITY`` and ``WANDB_MODE=offline``.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from stoker.errors import Problem, UserError, typed_reason
from stoker.files import replace_file
from stoker.job.resolved import ResolvedJob
from stoker.train.hooks import Hook
from stoker.train.step_hooks.tracked_metrics import missing_package, settings_of, tracking_hook


def wandb_hook(job: ResolvedJob, folder: Path) -> Hook:
    """Returns the hook that sends the metrics of steps and evaluations; a resumed run goes on in the same place.

    Args:
        folder: of the run.

    Raises:
        UserError: wandb is not installed, or cannot begin a run.
    """
    try:
        import wandb
    except ImportError as error:
        raise missing_package("wandb", "wandb") from error
    try:
        run = wandb.init(
            project=job.train.wandb,
            name=folder.name,
            id=_run_id(folder / "wandb" / "run_id"),
            resume="allow",
            dir=str(folder),
            config=settings_of(job),
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )
    except Exception as error:  # of the network, the server or the account
        message = f"train.wandb: Weights & Biases begins no run: {typed_reason(error)}"
        hint = "log in by `wandb login`, or set WANDB_MODE=offline and send it later by `wandb sync`"
        raise UserError(Problem(message, hint, key="train.wandb")) from error
    run.define_metric("step")
    run.define_metric("*", step_metric="step")  # a repeated step is not refused, as one of wandb's own count would be

    def send(numbers: dict[str, float], step: int) -> None:
        run.log({"step": step, **numbers})

    return tracking_hook(send, run.finish)


def _run_id(file: Path) -> str:
    """Returns the run's id there, which is chosen at the first start."""
    if not file.is_file():
        file.parent.mkdir(exist_ok=True)
        replace_file(file, f"{uuid.uuid4().hex}\n")
    return file.read_text(encoding="utf-8").strip()
