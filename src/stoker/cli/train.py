"""Train a job; the same command resumes an earlier run of it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.preflight import open_job, planned
from stoker.cli.trust_options import options_of
from stoker.errors import RunFailed, UserError
from stoker.job.task_spec import task_of

if TYPE_CHECKING:
    from stoker.launch.cluster_env import RankInfo
    from stoker.launch.run_spec import RunResult, RunSpec

DEFAULT_JOB = "job.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``stoker train``."""
    parser.add_argument(
        "job", nargs="?", default=DEFAULT_JOB, metavar="JOB", help=f"the job file (default: {DEFAULT_JOB})"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    parser.add_argument(
        "--fresh", action="store_true", help="put an earlier run in the same folder aside, and start over"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Train; returns 0 when done; 128 + signal, or `faults.requeue` after SIGTERM, when asked to stop before."""
    from stoker.launch.cluster_env import joined
    from stoker.launch.first_failure import Interrupted, LeftToAnother
    from stoker.resilience.deadline import exit_code

    if "=" in arguments.job and not Path(arguments.job).exists():  # values alone, for the default job file
        arguments.job, arguments.overrides = DEFAULT_JOB, [arguments.job, *arguments.overrides]
    rank_info = joined(os.environ)
    try:
        spec = _open(arguments, rank_info)
    except UserError as error:
        if rank_info is not None and not rank_info.speaks:
            return error.exit_code
        raise
    first = rank_info is None or rank_info.rank == 0
    if arguments.fresh and first:
        from stoker.runs.output_folder import is_run
        from stoker.runs.run_folder import put_aside

        if is_run(spec.output):
            print(f"the earlier run is now in {put_aside(spec.output)}", file=sys.stderr)
    try:
        ending = _train(spec, rank_info)
    except Interrupted as interrupted:
        return exit_code(interrupted.number, spec.loaded.job.faults)
    except LeftToAnother as error:
        return error.exit_code
    if first and arguments.json:
        print(json.dumps(_answer(spec.output, ending)))
    elif first:
        _say(arguments.job, arguments.overrides, spec, ending)
    return 0 if ending.state == "done" else exit_code(ending.signal or 0, spec.loaded.job.faults)


def _open(arguments: argparse.Namespace, rank_info: RankInfo | None) -> RunSpec:
    from stoker.cli.report import quiet_environment, quiet_libraries

    opened = open_job(arguments.job, arguments.overrides, trains=True)
    if rank_info is None and opened.job.faults.restarts:
        from stoker.launch.forkserver import start_server

        quiet_environment()
        start_server()  # it imports what the workers need while this process continues
    loaded = planned(opened, rank_info)
    from stoker.launch.cluster_env import check_world
    from stoker.launch.run_spec import RunSpec

    quiet_libraries()
    base = Path.cwd()
    spec = RunSpec(loaded, base, base / loaded.job.output, quiet=arguments.json, read=opened.document)
    if rank_info is not None:
        check_world(rank_info, spec.layout)
    return spec


def _train(spec: RunSpec, rank_info: RankInfo | None) -> RunResult:
    """Trains in the process that a launcher started, in this one, or in workers that this one starts."""
    from stoker.cli.report import TokeniseReport
    from stoker.hardware.device import check_devices
    from stoker.launch.first_failure import RankFailed
    from stoker.launch.supervisor import train_here
    from stoker.runs.run_folder import RunFolder

    folder = RunFolder(spec.output)
    if rank_info is not None:
        from stoker.launch.external_worker import train_as_member

        return train_as_member(spec, rank_info, TokeniseReport())
    check_devices(spec.devices, spec.layout.world)
    if spec.layout.one_process and not spec.loaded.job.faults.restarts:  # else this one lives when that one dies
        from stoker.launch.worker import held, train

        return train(spec, report=TokeniseReport(), hold=held(folder))
    from stoker.launch.data_gate import check_data

    with TokeniseReport() as report:
        check_data(spec, report)
    with folder.take() as is_new:
        try:
            return train_here(spec)
        except RankFailed as error:
            print(*getattr(error, "__notes__", ()), file=sys.stderr, end="")
            raise
        except UserError as error:
            if is_new and not isinstance(error, RunFailed):  # the job's or the machine's fault: nothing was trained
                shutil.rmtree(spec.output)
            raise


def _answer(output: Path, ending: RunResult) -> dict[str, Any]:
    from stoker.runs.plan_comparison import read_comparison
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


def _say(job: str, overrides: list[str], spec: RunSpec, ending: RunResult) -> None:
    output = spec.output
    shown = output.relative_to(Path.cwd()) if output.is_relative_to(Path.cwd()) else output
    if ending.state == "stopped":
        command = shlex.join(["stoker", "train", job, *overrides])
        print(f"stopped after step {ending.step} of {ending.steps}, saved in {shown}\nto go on: {command}")
        return
    if ending.held_out is not None and ending.held_out_before is not None:
        print(f"held-out loss {ending.held_out_before:.4f} -> {ending.held_out:.4f}")
    elif ending.last_loss is not None:
        print(f"loss {ending.first_loss:.4f} -> {ending.last_loss:.4f}")
    if ending.best_step not in (None, ending.step) and ending.keep_best:
        print(f"lowest held-out loss {ending.best_loss:.4f} at step {ending.best_step}: take it with --at best")
    print(f"done: {shown}")
    if commands := task_of(spec.loaded.job).next_commands(spec.loaded.job, str(shown)):
        trust = options_of(spec.loaded.job)
        print("\nnext:", *(f"  stoker {command}{trust}" for command in commands), sep="\n")
