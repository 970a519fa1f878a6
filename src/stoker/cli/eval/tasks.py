"""``stoker eval --tasks``: tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from stoker.cli.eval.answers import model_of, settings_of
from stoker.cli.eval.report import finish
from stoker.evaluate.harness import load_tasks, run_tasks, task_specs
from stoker.runs.evaluations import KeptEvaluation


def run_task_list(arguments: argparse.Namespace) -> int:
    """Runs the tasks, and stores and prints their results."""
    specs, notes = task_specs(arguments.tasks, Path.cwd())
    manager = load_tasks(specs)
    model = model_of(arguments)
    settings = settings_of(arguments)
    results = run_tasks(model, specs, settings, manager=manager, limit=arguments.limit, chat=arguments.chat)
    found = KeptEvaluation(
        kind="tasks",
        time=time.time(),
        model=model.name,
        step=model.step,
        data={"path": " ".join(arguments.tasks), "fingerprint": results.fingerprint, "rows": len(results.rows)},
        asked={"tasks": arguments.tasks, "limit": arguments.limit, "chat": arguments.chat, **settings.as_json()},
        figures=results.figures,
        details={"versions": results.versions},
    )
    return finish(arguments, found, results.rows, notes)
