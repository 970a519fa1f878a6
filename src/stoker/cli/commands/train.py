"""Train a job. The same command resumes an earlier run of it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.follow_data import check_follows, contents_of, wait_for_more, wait_until_complete
from stoker.cli.openmp_threads import patient_threads
from stoker.cli.preflight import open_job, with_planned_layout
from stoker.cli.print_problems import print_notes
from stoker.cli.run_options import options_of
from stoker.cli.stage_options import add_stage_options, asks_for_stages
from stoker.cli.start_over import start_fresh
from stoker.errors import Ended, Interrupted, RunFailed, UserError
from stoker.job import LoadedJob
from stoker.job.load_job import with_nodes
from stoker.job.paths import exists
from stoker.job.task_spec import is_language, task_of
from stoker.resilience.stop_signals import handled_by

if TYPE_CHECKING:
    from stoker.launch.cluster_env import RankInfo
    from stoker.launch.run_spec import RunSpec
    from stoker.runs.run_folder import RunFolder
    from stoker.train.run_result import RunResult

DEFAULT_JOB = "job.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker train``."""
    parser.add_argument(
        "job", nargs="?", default=DEFAULT_JOB, metavar="JOB", help=f"the job file (default: {DEFAULT_JOB})"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the job to override")
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
            from stoker.cli.train_stages import train_stages

            if arguments.follow is not None:
                raise UserError("--follow needs a single run, and this job has stages")
            return train_stages(arguments, rank_info)
        opened = open_job(arguments.job, arguments.overrides, trains=True)
        if arguments.follow is not None:
            check_follows(opened, arguments.follow, alone=rank_info is None)
        if task_of(opened.job).prompts:
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
    return _said(arguments, spec, ending, first=first)


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
            _said(arguments, spec, ending, first=True)
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
                _said(arguments, spec, ending, first=True)
            return exit_code(number, spec.loaded.job.faults)
        opened = open_job(arguments.job, arguments.overrides, trains=True)
        spec = spec_of(opened, None, quiet=arguments.json)


def _interrupt(number: int, _: Any) -> None:
    raise Interrupted(number)


def _said(arguments: argparse.Namespace, spec: RunSpec, ending: RunResult, *, first: bool) -> int:
    """Prints how a run ended; returns the exit code."""
    if first and arguments.json:
        print(json.dumps(answer_of(spec.output, ending)), flush=True)
    elif first:
        options = [] if arguments.follow is None else ["--follow", f"{arguments.follow:.15g}"]
        say_ending(spec, ending, shlex.join(["stoker", "train", arguments.job, *arguments.overrides, *options]))
    return ending.exit_code


def spec_of(opened: LoadedJob, rank_info: RankInfo | None, *, quiet: bool) -> RunSpec:
    """Returns the run's spec, with the planner's layout if the job asks for it."""
    from stoker.cli.quiet_libraries import quiet_environment, quiet_libraries

    if rank_info is None and opened.job.faults.restarts:
        from stoker.launch.forkserver import start_server

        quiet_environment()
        # It imports the workers' modules, in parallel to this process.
        start_server(language=is_language(opened.job))
    loaded = with_nodes(with_planned_layout(opened, rank_info), 1 if rank_info is None else rank_info.nodes)
    from stoker.launch.cluster_env import check_world
    from stoker.launch.run_spec import RunSpec

    quiet_libraries()
    base = Path.cwd()
    spec = RunSpec(loaded, base, base / loaded.job.output, quiet=quiet, read=opened.document)
    if rank_info is not None:
        check_world(rank_info, spec.layout)
    return spec


def trained(spec: RunSpec, rank_info: RankInfo | None = None, begun: Callable[[], None] | None = None) -> RunResult:
    """Trains in the process that a launcher started, in this one, or in workers that this one starts.

    Args:
        begun: called when the run's folder is locked, before training; not with a launcher.

    Raises:
        Ended: a signal, or another process of a launcher's, ended it before it had a result.
    """
    from stoker.resilience.deadline import exit_code

    try:
        return _train(spec, rank_info, begun or (lambda: None))
    except Interrupted as interrupted:
        print_notes(interrupted)
        raise Ended(exit_code(interrupted.number, spec.loaded.job.faults)) from None


def _train(spec: RunSpec, rank_info: RankInfo | None, begun: Callable[[], None]) -> RunResult:
    from stoker.cli.tokenise_report import TokeniseReport, quiet_report
    from stoker.launch.first_failure import RankFailed
    from stoker.launch.supervisor import train_here
    from stoker.runs.run_folder import RunFolder

    folder = RunFolder(spec.output)
    if rank_info is not None:
        from stoker.launch.external_worker import train_as_member

        return train_as_member(spec, rank_info, TokeniseReport())
    if spec.layout.one_process and not spec.loaded.job.faults.restarts:  # else this process must outlive the trainer
        from stoker.hardware.process_device import check_devices
        from stoker.launch.worker import lock_run_folder, train

        check_devices(spec.devices, spec.layout.world)
        return train(spec, report=TokeniseReport(), hold=lock_run_folder(folder, begun))
    from stoker.launch.start_checks import check_node

    checked = check_node(spec, spec.layout.world, quiet_report, devices=spec.devices)
    spec = replace(spec, cached=checked.cached)
    with take_folder(folder):
        try:
            begun()
            return train_here(spec, nccl=checked.nccl)
        except RankFailed as error:
            print_notes(error)
            raise


@contextmanager
def take_folder(folder: RunFolder) -> Iterator[bool]:
    """Locks a run's folder; yields whether it is new.

    If it is, and the block ends with an error of the job or the machine before training began, it is removed.
    """
    with folder.take() as is_new:
        try:
            yield is_new
        except UserError as error:
            if is_new and not isinstance(error, RunFailed) and not folder.has_begun():
                shutil.rmtree(folder.path)
            raise


def answer_of(output: Path, ending: RunResult) -> dict[str, Any]:
    """Returns the result of a run for JSON output."""
    from stoker.runs.plan_record import read_comparison
    from stoker.runs.run_folder import RunFolder

    comparison = read_comparison(RunFolder(output))
    return {
        "state": ending.state,
        "run": str(output),
        "step": ending.step,
        "held_out_loss": ending.held_out,
        "held_out_loss_before": ending.held_out_before,
        "plan": comparison and {**asdict(comparison), "line": comparison.line()},
    }


def say_ending(spec: RunSpec, ending: RunResult, command: str, *, last: bool = True) -> None:
    """Prints how a run ended.

    Args:
        command: command that resumes it.
        last: whether this is the last run, so that next commands are printed.
    """
    output = spec.output
    shown = output.relative_to(Path.cwd()) if output.is_relative_to(Path.cwd()) else output
    if ending.state == "stopped":
        print(f"stopped after step {ending.step} of {ending.steps}, saved in {shown}\nto continue: {command}")
        return
    task = task_of(spec.loaded.job)
    name, sign, best = ("score", -1, "highest") if task.prompts else ("loss", 1, "lowest")
    if ending.held_out is not None:
        both = [loss for loss in (ending.held_out_before, ending.held_out) if loss is not None]
        print(f"held-out {name}", " -> ".join(f"{sign * loss:z.4f}" for loss in both))
    elif ending.last_loss is not None:
        print(f"training loss {ending.first_loss:.4f} -> {ending.last_loss:.4f}")
    if ending.best_loss is not None and ending.best_step != ending.step and ending.keep_best:
        found = f"{best} held-out {name} {sign * ending.best_loss:z.4f} at step {ending.best_step}"
        print(f"{found}: select it with --at best")
    print(f"done: {shown}")
    if last and (commands := task.next_commands(spec.loaded.job, str(shown))):
        trust = options_of(spec.loaded.job)
        print("\nnext:", *(f"  stoker {command}{trust}" for command in commands), sep="\n")
