"""Metrics of a run in MLflow, with ``train.mlflow``.

Server and account are the package's own settings, such as ``MLFLOW_TRACKING_URI``.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import Problem, UserError, typed_reason
from stoker.files import replace_file
from stoker.job.resolved import ResolvedJob
from stoker.train.hooks import Hook
from stoker.train.step_hooks.tracked_metrics import missing_package, settings_of, tracking_hook

if TYPE_CHECKING:
    from mlflow import MlflowClient

MOST_PARAMS, LONGEST = 100, 500  # in one request; characters of a value


def mlflow_hook(job: ResolvedJob, folder: Path) -> Hook:
    """Returns the hook that sends the metrics of steps and evaluations; a resumed run goes on in the same place.

    Args:
        folder: of the run.

    Raises:
        UserError: mlflow is not installed, or cannot begin a run.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric
    except ImportError as error:
        raise missing_package("mlflow", "mlflow-skinny") from error
    try:
        client = MlflowClient()
        run = _run(client, job, folder)
    except Exception as error:  # of the network, the server or the account
        message = f"train.mlflow: MLflow begins no run: {typed_reason(error)}"
        raise UserError(Problem(message, "set MLFLOW_TRACKING_URI to its server", key="train.mlflow")) from error

    def send(numbers: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(_allowed(name), value, now, step) for name, value in numbers.items()]
        client.log_batch(run, metrics, synchronous=False)

    def finish() -> None:
        import mlflow

        try:
            mlflow.flush_async_logging()
            client.set_terminated(run)
        except Exception as error:  # a server that is gone must not cost the run
            print(f"note: the last metrics did not reach MLflow: {typed_reason(error)}", file=sys.stderr)

    return tracking_hook(send, finish)


def _run(client: MlflowClient, job: ResolvedJob, folder: Path) -> str:
    """Returns the id of the run there; creates it, with the job's settings, at the first start."""
    from mlflow.entities import Param

    kept = folder / "mlflow" / "run_id"
    if kept.is_file():
        run = kept.read_text(encoding="utf-8").strip()
        client.update_run(run, status="RUNNING")
        return run
    name = job.train.mlflow or ""
    found = client.get_experiment_by_name(name)
    run = client.create_run(
        client.create_experiment(name) if found is None else found.experiment_id, run_name=folder.name
    ).info.run_id
    params = [Param(_allowed(key), str(value)[:LONGEST]) for key, value in settings_of(job).items()]
    for begin in range(0, len(params), MOST_PARAMS):
        client.log_batch(run, params=params[begin : begin + MOST_PARAMS])
    kept.parent.mkdir(exist_ok=True)
    replace_file(kept, f"{run}\n")
    return str(run)


def _allowed(name: str) -> str:
    """Returns a name without the characters that MLflow refuses: ``data[0].path`` as ``data.0.path``."""
    return re.sub(r"[^\w. :/-]", "_", re.sub(r"[\[\].]+", ".", name))
