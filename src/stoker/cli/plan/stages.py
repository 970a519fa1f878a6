"""Plans of the stages of a job file: resident models, memory and time, and the totals."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from stoker.cli.output.text_table import print_table
from stoker.cli.plan.question import planned_on, question_on
from stoker.cli.preflight import open_stages
from stoker.errors import CannotRun, Problem, UserError
from stoker.job.keys.tune_keys import ADAPTERS
from stoker.job.load_job import LoadedJob
from stoker.job.stage import Stage
from stoker.job.stages import read_stages
from stoker.job.task_spec import task_of
from stoker.plan.answer.as_json import answer_json
from stoker.plan.answer.full_answer import SAMPLED, NothingFits, PlanAnswer, answer
from stoker.plan.answer.setting_to_yaml import time_words
from stoker.units import GIB

DRAWN = {"--show": "show", "--picture": "picture"}


@dataclass(frozen=True)
class StagePlan:
    """A stage and the planner's answer to its job."""

    stage: Stage
    loaded: LoadedJob
    found: PlanAnswer | NothingFits

    @property
    def resident(self) -> tuple[str, ...]:
        """Models in memory while it trains: ``policy (lora)``, ``reference (its base)``."""
        job = self.loaded.job
        first, *others = task_of(job).work.roles(job)
        adapted = job.tune.method in ADAPTERS
        words = [first if job.tune.method == "full" else f"{first} ({job.tune.method})"]
        for other in others:
            words.append(f"{other} (its base)" if other == "reference" and adapted else other)
        return tuple(words)

    @property
    def seconds(self) -> float | None:
        """Duration of all steps, including checkpoints and interruptions; None if their number depends on
        the data.
        """
        if isinstance(self.found, NothingFits) or not self.found.cost.known:
            return None
        return self.found.cost.forecast.seconds

    @property
    def memory(self) -> float | None:
        """Bytes on a device; None if nothing fits."""
        return None if isinstance(self.found, NothingFits) else self.found.plan.memory.peak


def plan_stages(arguments: argparse.Namespace) -> int:
    """Plans the chosen stages and prints a row for each; returns 0.

    Raises:
        CannotRun: a stage fits in no layout.
    """
    for option, name in DRAWN.items():
        if getattr(arguments, name):
            hint = f"write `stoker check {arguments.job} --only STAGE > stage.yaml` and plan that"
            raise UserError(Problem(f"{option} draws one job, and this file has stages", hint))
    from stoker.cluster.chosen_target import split_overrides

    overrides, _ = split_overrides(arguments.on, arguments.overrides)
    chosen = read_stages(arguments.job, overrides).chosen(only=arguments.only, begin=arguments.begin)
    opened = open_stages(chosen)
    on = planned_on(opened[0], arguments)  # the target is that of all stages
    plans = [
        StagePlan(stage, loaded, answer(question_on(loaded, on))) for stage, loaded in zip(chosen, opened, strict=True)
    ]
    if arguments.json:
        print(json.dumps(_as_json(plans)))
    else:
        _print(plans)
    unfit = [plan.stage.name for plan in plans if isinstance(plan.found, NothingFits)]
    if unfit:
        hint = f"`stoker check {arguments.job} --only {unfit[0]} > stage.yaml; stoker plan stage.yaml` says what would"
        raise CannotRun(Problem(f"nothing fits in stage {unfit[0]}", hint))
    return 0


def _total(plans: list[StagePlan]) -> tuple[float | None, float | None]:
    """Returns the largest memory and the total time; None if one is unknown."""
    memory, seconds = [plan.memory for plan in plans], [plan.seconds for plan in plans]
    return (
        None if None in memory else max(m for m in memory if m is not None),
        None if None in seconds else sum(s for s in seconds if s is not None),
    )


def _as_json(plans: list[StagePlan]) -> dict[str, Any]:
    memory, seconds = _total(plans)
    stages = [
        {
            "name": plan.stage.name,
            "task": plan.loaded.job.task,
            "needs": dict(plan.stage.needs),
            "resident": plan.resident,
            **answer_json(plan.found),
        }
        for plan in plans
    ]
    return {"stages": stages, "total": {"memory_gib": memory and memory / GIB, "seconds": seconds}}


def _print(plans: list[StagePlan]) -> None:
    rows: list[tuple[str, ...]] = []
    for plan in plans:
        head = plan.stage.name, plan.loaded.job.task, ", ".join(plan.resident)
        found = plan.found
        if isinstance(found, NothingFits):
            rows.append((*head, "nothing fits", *"----"))
            continue
        layout = found.plan.setting.layout.describe()
        steps = f"{found.cost.steps:,}" if found.cost.known else "by the data"
        rows.append((*head, layout, _gib(plan.memory), time_words(found.plan.seconds), steps, _time(plan.seconds)))
    memory, seconds = _total(plans)
    rows.append(("total", "", "", "", _gib(memory), "", "", _time(seconds)))
    columns = ("stage", "task", "resident", "layout", ">memory", ">step", ">steps", ">time")
    print_table(columns, rows)
    if any(task_of(plan.loaded.job).rows.prompts for plan in plans):
        print(f"\n{SAMPLED}")


def _gib(memory: float | None) -> str:
    return "-" if memory is None else f"{memory / GIB:.1f} GiB"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else time_words(seconds)
