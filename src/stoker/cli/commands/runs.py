"""List runs: state, step, losses, how their time was spent, and their evaluations."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.output.amounts import ago
from stoker.cli.output.text_table import print_table
from stoker.errors import UserError

if TYPE_CHECKING:
    from stoker.runs.goodput import Goodput
    from stoker.runs.listing import RunSummary

ALL = "runs"
FIGURES = (">step", ">loss", ">held out", ">effective", ">last update")  # columns of `_figures`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker runs``."""
    parser.add_argument(
        "run",
        nargs="?",
        default=ALL,
        metavar="RUN",
        help="a run's folder, its name below runs/, or a folder of runs (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")
    parser.add_argument(
        "--submitted", action="store_true", help="list submitted runs, with the state that their targets report"
    )
    parser.add_argument(
        "--on", metavar="TARGET", help="list all runs known to this target, including those submitted elsewhere"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the runs, the newest first."""
    if arguments.submitted or arguments.on:
        from stoker.cli.submitted_runs import print_submitted_runs

        return print_submitted_runs(arguments.on, as_json=arguments.json)
    if stages := _stages(arguments.run):
        return _print_stages(stages, as_json=arguments.json)
    runs = _runs(arguments.run)
    if arguments.json:
        print(json.dumps([_answer(r) for r in runs], indent=2))
        return 0
    _print_hint()
    if not runs:
        print(f"no runs in {arguments.run}; `stoker train JOB` creates one")
        return 0
    print_table(
        ("run", "state", "task", "model", *FIGURES), [(r.path, r.state, r.task, r.model, *_figures(r)) for r in runs]
    )
    _print_problems(runs)
    if len(runs) == 1 and runs[0].goodput is not None and runs[0].goodput.wall:
        _print_split(runs[0].goodput)
    if len(runs) == 1:
        _print_evaluations(Path(runs[0].path))
    return 0


def _print_hint() -> None:
    """Prints a hint if there are submitted runs."""
    from stoker.cluster.record import all_records

    if count := len(all_records()):
        were = "runs were" if count > 1 else "run was"
        print(f"{count} {were} submitted: `stoker runs --submitted`", file=sys.stderr)


def _stages(name: str) -> list[tuple[dict[str, Any], RunSummary | None]]:
    """Returns the stages of a folder, or of that name below runs/, in the job's order; None for one that has
    not begun.
    """
    from stoker.runs.listing import listed
    from stoker.runs.run_folder import RunFolder
    from stoker.runs.stage_runs import read_record

    root = next((folder for folder in (Path(name), Path(ALL) / name) if folder.is_dir()), None)
    folders = [(stage, RunFolder(Path(stage["run"]))) for stage in (read_record(root) if root is not None else [])]
    return [(stage, listed(folder) if folder.events.is_file() else None) for stage, folder in folders]


def _print_stages(stages: list[tuple[dict[str, Any], RunSummary | None]], *, as_json: bool) -> int:
    if as_json:
        answers = [stage | ({"state": "waiting"} if run is None else _answer(run)) for stage, run in stages]
        print(json.dumps(answers, indent=2))
        return 0
    rows = []
    for stage, run in stages:
        row = [stage["name"], stage["task"], ", ".join(stage["needs"]) or "-"]
        row += ["waiting", *"-----"] if run is None else [run.state, *_figures(run)]
        rows.append([*row, stage["run"]])
    print_table(("stage", "task", "needs", "state", *FIGURES, "run"), rows)
    _print_problems([run for _, run in stages if run is not None])
    return 0


def _print_problems(runs: list[RunSummary]) -> None:
    for run in runs:
        if run.problem:
            print(run.problem, file=sys.stderr)


def _runs(name: str) -> list[RunSummary]:
    """Returns the runs in a folder, or the one of that name.

    Raises:
        UserError: neither such a folder nor such a run exists.
    """
    from stoker.runs.find_run import find_run
    from stoker.runs.listing import list_runs, summarise

    runs = list_runs(Path(name))
    if runs or name == ALL:
        return runs
    try:
        return [summarise(find_run(name, Path()))]  # relative, as in the list of all runs
    except UserError:
        if Path(name).is_dir():
            return []
        raise


def _answer(run: RunSummary) -> dict[str, Any]:
    """Returns the summary with its evaluations, and the run's effective training time, a fraction of its wall time."""
    from stoker.runs.evaluations import read_evaluations

    answer = asdict(run) | {"evaluations": [each.as_json() for each in read_evaluations(Path(run.path))]}
    if run.goodput is not None:
        answer["goodput"]["effective"] = run.goodput.effective
    return answer


def _print_split(split: Goodput) -> None:
    from stoker.runs.goodput import DESCRIPTIONS

    print(f"\n{split.wall:.1f} s, {split.first_step:.1f} s to the end of the first step, of which")
    for cause, seconds in sorted(split.parts.items(), key=lambda item: -item[1]):
        if seconds >= 0.001 * split.wall:
            print(f"  {seconds / split.wall:6.1%}  {seconds:9.1f} s  {DESCRIPTIONS[cause]}")


def _print_evaluations(folder: Path) -> None:
    from stoker.runs.evaluations import read_evaluations

    kept = read_evaluations(folder)
    if not kept:
        return
    rows = []
    for each in kept:
        for figure in each.figures:
            error = "-" if figure.standard_error is None else f"{figure.standard_error:.4f}"
            of = f"{figure.of}: " if figure.of else ""
            what = each.kind, str(each.data.get("path", "")), str(each.step or "-"), of + figure.name
            rows.append((*what, _number(figure.value), error, str(figure.rows)))
    print()
    print_table(("evaluation", "data", "step", "measure", ">value", ">standard error", ">rows"), rows)


def _figures(run: RunSummary) -> tuple[str, ...]:
    """Returns step, losses, effective time and age as shown in the tables."""
    step = f"{run.step}/{run.steps}" if run.steps else "-"
    effective = "-" if run.goodput is None else f"{run.goodput.effective:.0%}"
    return step, _number(run.loss), _number(run.held_out_loss), effective, ago(run.age)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
