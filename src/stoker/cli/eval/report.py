"""Storing and printing of evaluations: tables of figures with their uncertainty."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.cli.output.text_table import print_table
from stoker.errors import Problem, RunFailed, UserError
from stoker.evaluate.trained_files import trained_files, trained_note
from stoker.models.model_source import find_model
from stoker.runs.evaluations import FOLDER, Figure, KeptEvaluation, keep
from stoker.runs.find_run import find_run


def place_of_results(arguments: argparse.Namespace, base: Path) -> Path | None:
    """Returns the folder for results; None if they are only printed."""
    if arguments.to is not None:
        return base / str(arguments.to)
    return None if find_model(arguments.run, base, or_run=True) is not None else find_run(arguments.run, base).path


def check_place(arguments: argparse.Namespace) -> None:
    """Rejects a folder for results that cannot be written, before the evaluation.

    Raises:
        UserError: it cannot be written.
    """
    place = place_of_results(arguments, Path.cwd())
    if place is None:
        return
    nearest = next(path for path in (place / FOLDER, place, *place.parents) if path.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(Problem(f"results cannot be written to {place}", "name another folder with --to FOLDER"))


def finish(
    arguments: argparse.Namespace, found: KeptEvaluation, rows: list[dict[str, Any]], notes: Sequence[str]
) -> int:
    """Stores an evaluation where there is a folder for it, and prints it.

    Raises:
        RunFailed: it cannot be stored; it has been printed.
    """
    trained = trained_files(arguments.run, found.data.get("path"), Path.cwd())
    found = replace(found, details=found.details | ({"trained_files": trained} if trained else {}))
    place = place_of_results(arguments, Path.cwd())
    kept: Path | None = None
    failed: RunFailed | None = None
    try:
        kept = keep(place, found, rows) if place is not None else None
    except RunFailed as error:
        failed = error
    if arguments.json:
        print(json.dumps(found.as_json() | {"kept": str(kept) if kept else None}), flush=True)
    else:
        print_figures(found.figures)
        for note in (*notes, *trained_note(trained)):
            print(note, flush=True)
    if failed is not None:
        raise failed
    if arguments.json:
        return 0
    if kept:
        print(f"saved in {kept} and {kept.with_suffix('.jsonl').name}")
    else:
        print(f"results are not saved: {arguments.run} is not a run; give a folder with --to FOLDER")
    return 0


def print_figures(figures: Sequence[Figure]) -> None:
    """Prints one line per figure."""
    several = any(figure.of for figure in figures)
    intervals = any(figure.low is not None for figure in figures)
    rows = []
    for figure in figures:
        error = "-" if figure.standard_error is None else f"{figure.standard_error:.4f}"
        sign = "+" if figure.standard_error is None else ""  # of a difference
        between = "-" if figure.low is None else f"{figure.low:{sign}.4f} to {figure.high:{sign}.4f}"
        head = [*([figure.of] if several else []), figure.name, f"{figure.value:.4f}", error]
        rows.append([*head, *([between] if intervals else []), str(figure.rows)])
    columns = [*(["of"] if several else []), "measure", ">value", ">standard error"]
    print_table([*columns, *([">interval"] if intervals else []), ">rows"], rows)
