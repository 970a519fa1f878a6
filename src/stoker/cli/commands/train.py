"""Train a job. The same command resumes an earlier run of it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.options.stage_options import add_stage_options, asks_for_stages
from stoker.cli.output.run_report import answer_of, say_ending
from stoker.cli.preflight import open_job
from stoker.cli.train.follow_data import check_follows, contents_of, wait_for_more, wait_until_complete
from stoker.cli.train.openmp_threads import patient_threads
from stoker.cli.train.start_over import start_fresh
from stoker.cli.train.start_run import spec_of, trained
from stoker.errors import Interrupted, UserError
from stoker.job import LoadedJob
from stoker.job.paths import exists
from stoker.job.task_spec import task_of
from stoker.resilience.stop_signals import handled_by

if TYPE_CHECKING:
    from stoker.launch.run_spec import RunSpec
    from stoker.train.run_result import RunResult

DEFAULT_JOB = "job.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker train``."""
    parser.add_argument(
        "job", nargs="?", default=DEFAULT_JOB, metavar="JOB", help=f"the job file (default: {DEFAULT_JOB})"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the job to override")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over; an earlier run in the same folder and its checkpoints are renamed and kept; when "
        "torchrun or Slurm restarts the command, the run that it began resumes instead",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON, and nothing else")
    parser.add_argument(
        "--follow",
        type=float,
        metavar="SECONDS",
        help="at the end of the data, check for new rows every SECONDS and continue; needs `ranking.progressive`",
    )
    add_stage_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns 0 when done; 128 + signal, or `faults.requeue` after SIGTERM, when stopped before."""
    from stoker.launch.cluster_env import rank_info_from_env

    if "=" in arguments.job and not exists(Path(arguments.job)):  # values alone, for the default job file
        arguments.job, arguments.overrides = DEFAULT_JOB, [arguments.job, *arguments.overrides]
    rank_info = rank_info_from_env(os.environ)
    try:
        if asks_for_stages(arguments.job, only=arguments.only, begin=arguments.begin):
            from stoker.cli.train.stages import train_stages

            if arguments.follow is not None:
                raise UserError("--follow needs a single run, and this job has stages")
            return train_stages(arguments, rank_info)
        opened = open_job(arguments.job, arguments.overrides, "train")
        if arguments.follow is not None:
            check_follows(opened, arguments.follow, alone=rank_info is None)
        if task_of(opened.job).rows.prompts:
            patient_threads()
        spec = spec_of(opened, rank_info, quiet=arguments.json)
    except UserError as error:
        if rank_info is not None:
            from stoker.launch.reporting_process import reported_elsewhere

            if reported_elsewhere(rank_info):
                return error.exit_code
        raise
    first = rank_info is None or rank_info.rank == 0
    if arguments.fresh and first:
        start_fresh(spec.output, spec.loaded.job.checkpoint.to, spec.base)
    if arguments.follow is not None:
        return _follow(arguments, opened, spec)
    ending = trained(spec, rank_info)
    return _print_ending(arguments, spec, ending, first=first)


def _follow(arguments: argparse.Namespace, opened: LoadedJob, spec: RunSpec) -> int:
    """Trains repeatedly, each time on the data that have arrived since, until a signal comes."""
    from stoker.resilience.deadline import exit_code

    step = 0
    wait_until_complete(opened, spec.base, arguments.follow)
    while True:
        known = contents_of(opened, spec.base)
        ending = trained(spec)
        number = ending.signal if ending.state == "done" else ending.signal or 0
        if arguments.json:
            _print_ending(arguments, spec, ending, first=True)
        elif number is None and ending.step > step:
            print(f"trained on all rows up to step {ending.step}, loss {ending.last_loss:.4f}", flush=True)
        step = ending.step
        if number is None:
            try:
                with handled_by(_interrupt):
                    wait_for_more(opened, spec.base, known, arguments.follow)
            except Interrupted as interrupted:
                number = interrupted.number
        if number is not None:
            if not arguments.json:
                _print_ending(arguments, spec, ending, first=True)
            return exit_code(number, spec.loaded.job.faults)
        opened = open_job(arguments.job, arguments.overrides, "train")
        spec = spec_of(opened, None, quiet=arguments.json)


def _interrupt(number: int, _: Any) -> None:
    raise Interrupted(number)


def _print_ending(arguments: argparse.Namespace, spec: RunSpec, ending: RunResult, *, first: bool) -> int:
    """Prints how a run ended; returns the exit code."""
    if first and arguments.json:
        print(json.dumps(answer_of(spec.output, ending)), flush=True)
    elif first:
        options = [] if arguments.follow is None else ["--follow", f"{arguments.follow:.15g}"]
        say_ending(spec, ending, shlex.join(["stoker", "train", arguments.job, *arguments.overrides, *options]))
    return ending.exit_code
