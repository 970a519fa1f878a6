"""The API's answers in a report: those of some runs, without data of the machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stoker.json_values import map_leaves
from stoker.page.access.mask_secrets import mask_secrets
from stoker.page.run_data.answer_views import evaluation_figures
from stoker.page.run_data.metric_series import SeriesCache
from stoker.page.run_data.run_index import id_of
from stoker.page.run_data.run_view import RunViews
from stoker.runs.evaluations import read_evaluations
from stoker.runs.run_folder import RunFolder

POINTS = 2000
MOST_KEYS = 64
PATH = re.compile(r"(?<![\w:/.])~?/(?:[^\s/'\":,]+/)*([^\s/'\":,]+)")  # absolute; the last part is its name
OF_THE_MACHINE = ("command", "git", "platform")  # of the run's environment


def report_answers(folders: Sequence[RunFolder]) -> dict[str, Any]:
    """Answers by address, without queries; paths of the machine are left out."""
    views = RunViews(SeriesCache())
    found: dict[str, Any] = {"/api/runs": {"runs": []}}
    for folder in folders:
        path = f"/api/runs/{id_of(folder.path)}"
        detail = views.detail(folder)
        environment = {key: value for key, value in detail["environment"].items() if key not in OF_THE_MACHINE}
        detail = _without_paths(detail | {"folder": folder.path.name, "environment": environment})
        series = views.series.of(folder.metrics)
        curves = series.curve(series.keys()[:MOST_KEYS], axis="step", begin=None, end=None, points=POINTS).as_json()
        found["/api/runs"]["runs"].append(_without_paths(views.summary(folder) | {"folder": folder.path.name}))
        found |= {
            path: detail,
            f"{path}/events": {"events": _without_paths(views.short_events(folder))},
            f"{path}/metrics": {**curves, "keys": series.keys()},
            f"{path}/samples": {"samples": _without_paths(mask_secrets(views.samples(folder)))},
            f"{path}/evaluations": {
                "evaluations": _without_paths(list(evaluation_figures(read_evaluations(folder.path))))
            },
        }
    return found


def _without_paths(value: Any) -> Any:
    """Shortens absolute paths in texts to their last component."""
    return map_leaves(value, lambda leaf: PATH.sub(r"\1", leaf) if isinstance(leaf, str) else leaf)
