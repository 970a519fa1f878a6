"""The result of a run as text and as JSON."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.options.run_options import options_of
from stoker.job.task_spec import task_of
from stoker.resilience.stop_signals import STOPPED_BEFORE

if TYPE_CHECKING:
    from stoker.launch.run_spec import RunSpec
    from stoker.train.run_result import RunResult


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
        saved = f"stopped after step {ending.step} of {ending.steps}, saved in {shown}"
        print(saved if ending.step else STOPPED_BEFORE)
        print(f"to continue: {command}")
        return
    task = task_of(spec.loaded.job)
    name, sign, best = ("score", -1, "highest") if task.rows.prompts else ("loss", 1, "lowest")
    losses = (ending.held_out_before, ending.held_out, ending.best_loss)
    before, after, lowest = (None if loss is None else f"{sign * loss:z.4f}" for loss in losses)
    if after:
        print(f"held-out {name}", f"{before} -> {after}" if before else after)
    elif ending.last_loss is not None:
        print(f"training loss {ending.first_loss:.4f} -> {ending.last_loss:.4f}")
    if lowest and lowest != after and ending.best_step != ending.step and ending.keep_best:
        print(f"{best} held-out {name} {lowest} at step {ending.best_step}: select it with --at best")
    print(f"done: {shown}")
    if last and (commands := task.next_commands(spec.loaded.job, shlex.quote(str(shown)))):
        trust = options_of(spec.loaded.job)
        print("\nnext:", *(f"  stoker {command}{trust}" for command in commands), sep="\n")
