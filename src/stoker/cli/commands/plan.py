"""Choose a layout: predicted memory, step time, cost and risk, and why the alternatives were not chosen."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cli.options.stage_options import asks_for_stages
from stoker.cli.plan.question import planned_on, question_on
from stoker.errors import Problem, UserError
from stoker.files import replace_file
from stoker.job.stages import has_stages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.job import LoadedJob

OF_PLANS = ("job", "on", "cluster_only", "show", "picture", "only")  # arguments that only a plan of a job uses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker plan``."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="the job file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the job to override")
    parser.add_argument(
        "--on",
        metavar="CLUSTER",
        help="a cluster file, 4x8xH100, or a target of `stoker submit` (default: `target` of the job)",
    )
    parser.add_argument("--cluster-only", action="store_true", help="read --on as a cluster, never as a target")
    parser.add_argument(
        "--show", action="store_true", help="draw the memory of every pipeline stage and the timeline of one step"
    )
    parser.add_argument("--picture", metavar="FILE.svg", help="write the drawing of --show as an SVG file")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, and nothing else")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure this machine's speed; later plans use the result"
    )
    parser.add_argument(
        "--seconds",
        metavar="N",
        type=float,
        help="seconds that --calibrate spends on rates (default: 40); two minutes in all, more with several GPUs",
    )
    parser.add_argument(
        "--from",
        metavar="RUN",
        dest="begin",
        help="folder of a finished run, to correct later plans; for a job with stages: the stage to start at",
    )
    parser.add_argument("--only", metavar="STAGE", help="plan only this stage of a job with stages")


def run(arguments: argparse.Namespace) -> int:
    """Plans; returns 0, or exits with 3 where nothing fits."""
    if arguments.calibrate:
        _refuse_beside("--calibrate", arguments, (*OF_PLANS, "begin"))
        from stoker.cli.plan.planner_learning import calibrate_here

        return calibrate_here(arguments.seconds, as_json=arguments.json)
    if arguments.seconds is not None:
        raise UserError(Problem("--seconds has no effect without --calibrate", "remove it"))
    if arguments.begin and not (arguments.job and has_stages(arguments.job)):
        _refuse_beside("--from", arguments, OF_PLANS)
        from stoker.cli.plan.planner_learning import learn_from

        return learn_from(arguments.begin, as_json=arguments.json)
    if not arguments.job:
        raise UserError(Problem("no job is given", "write `stoker plan JOB --on CLUSTER`"))
    if asks_for_stages(arguments.job, only=arguments.only, begin=arguments.begin):
        from stoker.cli.plan.stages import plan_stages

        return plan_stages(arguments)
    from stoker.cluster.chosen_target import split_overrides
    from stoker.job import load_job
    from stoker.job.task_spec import task_of

    overrides, _ = split_overrides(arguments.on, arguments.overrides)
    loaded = load_job(arguments.job, overrides)
    if task_of(loaded.job).ranks:
        return _plan_ranking(loaded, arguments)
    from stoker.cli.plan.report import picture, print_answer, refusal
    from stoker.plan.answer.full_answer import NothingFits, answer

    found = answer(question_on(loaded, planned_on(loaded, arguments)))
    if arguments.picture and not isinstance(found, NothingFits):
        path = Path(arguments.picture)
        try:
            replace_file(path, picture(found))
        except OSError as error:
            raise UserError(Problem(f"cannot be written: {error.strerror}", file=str(path))) from None
    if arguments.json:
        from stoker.plan.answer.as_json import answer_json

        print(json.dumps(answer_json(found)))
    if isinstance(found, NothingFits):
        raise refusal(found, quiet=arguments.json)
    if not arguments.json:
        print_answer(found, pictures=arguments.show)
    return 0


def _refuse_beside(option: str, arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises UserError if an argument is given beside an option with which nothing is planned."""
    for name in names:
        if given := getattr(arguments, name):
            shown = given if name == "job" else "--from" if name == "begin" else f"--{name.replace('_', '-')}"
            what = f"{shown} has no effect with {option}, which plans nothing"
            raise UserError(Problem(what, f"run `stoker plan` with {option} alone, then `stoker plan JOB`"))


def _plan_ranking(loaded: LoadedJob, arguments: argparse.Namespace) -> int:
    """Plans a ranking model; returns 3 where it does not fit."""
    from stoker.cli.plan.ranking_report import print_ranking_plan
    from stoker.train.ranking.plan_ranking import plan_ranking

    for option in ("show", "picture"):
        if getattr(arguments, option):
            raise UserError(Problem(f"--{option} is for language models: task {loaded.job.task} has no picture"))
    on = planned_on(loaded, arguments)
    found = plan_ranking(loaded, Path.cwd(), on.cluster)
    if arguments.json:
        print(json.dumps(found.as_json()))
    else:
        print_ranking_plan(found, on.on)
    return 0 if found.fits else 3
