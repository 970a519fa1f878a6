"""List the runs: state, step, losses."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

MINUTE, HOUR, DAY = 60, 3600, 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``stoker runs``."""
    parser.add_argument("folder", nargs="?", default="runs", metavar="FOLDER", help="where to look (default: runs)")
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the runs, the newest first."""
    from stoker.runs.listing import list_runs

    runs = list_runs(Path(arguments.folder))
    if arguments.json:
        print(json.dumps([asdict(r) for r in runs], indent=2))
        return 0
    if not runs:
        print(f"no runs in {arguments.folder}; `stoker train JOB` makes one")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in ("run", "state", "task", "model", "step", "loss", "held out", "last sign"):
        table.add_column(column, justify="right" if column in ("step", "loss", "held out", "last sign") else "left")
    for r in runs:
        step = f"{r.step}/{r.steps}" if r.steps else "-"
        table.add_row(r.path, r.state, r.task, r.model, step, _number(r.loss), _number(r.held_out_loss), _ago(r.age))
    Console(soft_wrap=True, highlight=False).print(table)
    return 0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _ago(seconds: float) -> str:
    for unit, name in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
