"""Write a job file from a recipe. Comments give the type, default and meaning of every key."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from stoker.cli.new_file import write_new
from stoker.errors import UserError
from stoker.job.recipes import DEFAULT_RECIPE, recipe_description, recipe_names, write_recipe

PLANNED_ON = ("1xH100", "8xH100")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker new``."""
    parser.add_argument(
        "recipe",
        nargs="?",
        default=DEFAULT_RECIPE,
        metavar="RECIPE",
        help=f"a recipe of --list (default: {DEFAULT_RECIPE})",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="job.yaml",
        metavar="FILE",
        help="job file to write, or - for stdout (default: job.yaml)",
    )
    parser.add_argument("--list", action="store_true", help="list the recipes")


def run(arguments: argparse.Namespace) -> int:
    """Writes the recipe. Raises UserError for an unknown recipe and for a file that exists."""
    if arguments.list:
        for name in recipe_names():
            print(f"{name}\n  {recipe_description(name)}")
        return 0
    text = write_recipe(arguments.recipe)
    if arguments.output == "-":
        sys.stdout.write(text)
        return 0
    path = Path(arguments.output)
    write_new(str(path), text, option="-o FILE")
    print(f"{path} written; next: stoker train {shlex.quote(str(path))}")
    for line in _what_it_takes(path):
        print(line)
    return 0


def _what_it_takes(path: Path) -> Iterator[str]:
    """Yields the planner's predictions for the job on one GPU and on eight; none for a job without a language model."""
    from stoker.cli.plan.question import question_on
    from stoker.cluster.planned_cluster import PlannedCluster
    from stoker.hardware.machines.cluster_file import load_cluster
    from stoker.job.load_job import load_job
    from stoker.job.stages import has_stages, read_stages
    from stoker.plan.answer.setting_to_yaml import time_words
    from stoker.plan.search import search

    jobs = [("", load_job(path))] if not has_stages(path) else []
    jobs = jobs or [(f", stage {stage.name}", stage.load()) for stage in read_stages(path).stages]
    for on in PLANNED_ON:
        for stage, loaded in jobs:
            try:
                question = question_on(loaded, PlannedCluster(load_cluster(on), on))
            except UserError:
                return
            plans = search(question.work, question.cluster, software=question.software, kept=1).plans
            if plans:
                plan, steps = plans[0], question.length.steps
                run = f", {time_words(steps * plan.seconds)} for {steps} steps" if steps else ""
                memory = f"{plan.memory.peak / 2**30:.1f} GiB per device"
                yield f"on {on}{stage}, predicted: {memory}, {plan.seconds:.2g} s per step{run}"
