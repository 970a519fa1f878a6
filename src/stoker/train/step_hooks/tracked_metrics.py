"""The metrics of a run as trackers get them: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from stoker.errors import Problem, UserError
from stoker.job.keys.key_paths import dotted, leaves
from stoker.job.resolved import ResolvedJob
from stoker.node_cache.urls import is_url, without_secrets
from stoker.runs.step_metrics import StepMetrics
from stoker.train.hooks import Hook

NAMES = ("loss", "grad_norm", "lr", "tokens_per_s", "memory_gib", "samples")


def tracking_hook(send: Callable[[dict[str, float], int], None], finish: Callable[[], None] = lambda: None) -> Hook:
    """Returns the hook of a tracker.

    Args:
        send: takes the metrics of a step or of an evaluation by name, and the step.
        finish: called after the last step.
    """
    return Hook(
        after_step=lambda metrics: send(_of_step(metrics), metrics.step),
        evaluated=lambda step, figures: send(_of_evaluation(figures), step),
        after_run=finish,
    )


def _of_step(metrics: StepMetrics) -> dict[str, float]:
    """Returns the metrics of a step by name, such as ``train/loss``."""
    return _numbers("train", {**{name: getattr(metrics, name) for name in NAMES}, **metrics.measures})


def _of_evaluation(figures: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures of an evaluation by name, such as ``evaluate/loss``."""
    return _numbers("evaluate", figures)


def _numbers(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values that are finite numbers; trackers draw no others."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {f"{group}/{name}": float(value) for name, value in numbers.items() if math.isfinite(value)}


def settings_of(job: ResolvedJob) -> dict[str, Any]:
    """Returns the keys of a job that have values; URLs have no secrets."""
    found = {dotted(path): value for path, value in leaves(job) if value not in (None, [], {})}
    return {key: _public(value) for key, value in found.items()}


def _public(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    return without_secrets(str(value)) if is_url(str(value)) else str(value)


def missing_package(key: str, package: str) -> UserError:
    """Returns the error of a tracker whose package is not installed."""
    message = f"train.{key} needs the package {package}"
    return UserError(Problem(message, f"pip install 'stoker[{key}]'", key=f"train.{key}"))
