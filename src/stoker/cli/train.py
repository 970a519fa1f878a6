"""Train a job; the same command goes on where an earlier run of it stopped."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.preflight import open_job
from stoker.job import LoadedJob

if TYPE_CHECKING:
    from stoker.train.loop import Loop, Outcome

SIGNAL_EXIT = 128  # a shell's convention: 128 + the signal that ended the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``stoker train``."""
    parser.add_argument("job", metavar="JOB", help="the job file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    parser.add_argument(
        "--fresh", action="store_true", help="put an earlier run in the same folder aside, and start anew"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Train; returns 0 when done, 128 + signal when asked to stop before."""
    base = Path.cwd()
    loaded = open_job(arguments.job, arguments.overrides)
    assert loaded.job.output is not None
    return _train(loaded, base, base / loaded.job.output, arguments)


def _train(loaded: LoadedJob, base: Path, output: Path, arguments: argparse.Namespace) -> int:
    from stoker.cli.report import TokeniseReport, quiet_libraries
    from stoker.runs.folder import RunFolder, put_aside

    quiet_libraries()
    if arguments.fresh and output.exists():
        print(f"the earlier run is now in {put_aside(output)}", file=sys.stderr)
    folder = RunFolder(output)
    from stoker.train.run import prepare, start

    with TokeniseReport() as report:
        prepared = prepare(loaded, base, report)
    with folder.take():  # only now: a job that cannot be prepared leaves no folder behind
        outcome, loop = start(prepared, folder, base, quiet=arguments.json)
    if arguments.json:
        print(json.dumps(_answer(output, outcome)))
    else:
        _say(arguments.job, arguments.overrides, output, outcome, loop)
    return 0 if outcome.state == "done" else SIGNAL_EXIT + (outcome.signal or 0)


def _answer(output: Path, outcome: Outcome) -> dict[str, Any]:
    evaluation = outcome.evaluation
    return {
        "state": outcome.state,
        "run": str(output),
        "step": outcome.step,
        "held_out_loss": evaluation.loss if evaluation else None,
        "held_out_loss_before": outcome.first_evaluation,
    }


def _say(job: str, overrides: list[str], output: Path, outcome: Outcome, loop: Loop) -> None:
    shown = output.relative_to(Path.cwd()) if output.is_relative_to(Path.cwd()) else output
    if outcome.state == "stopped":
        command = shlex.join(["stoker", "train", job, *overrides])
        print(f"stopped after step {outcome.step} of {loop.plan.steps}, saved in {shown}\nto go on: {command}")
        return
    progress = loop.progress
    if outcome.evaluation and outcome.first_evaluation is not None:
        print(f"held-out loss {outcome.first_evaluation:.4f} -> {outcome.evaluation.loss:.4f}")
    elif progress.last_loss is not None:
        print(f"loss {progress.first_loss:.4f} -> {progress.last_loss:.4f}")
    if progress.best_step not in (None, outcome.step) and loop.plan.keep_best:
        print(f"lowest held-out loss {progress.best_loss:.4f} at step {progress.best_step}: take it with --at best")
    print(f"done: {shown}")
    if loop.task.unit == "token":
        commands = (
            f"chat {shown} --compare",
            f"eval {shown} YOUR.jsonl",
            f"export {shown} --format merged --to exported",
        )
        print("\nnext:", *(f"  stoker {command}" for command in commands), sep="\n")
