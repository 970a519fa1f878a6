"""Convert a LLaMA-Factory, Axolotl, TRL, torchtune, DeepSpeed or Accelerate file into a job; report what is lost."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from stoker.cli.new_file import already_exists, write_new
from stoker.console import Console
from stoker.errors import Problem, UserError
from stoker.job.importers import FORMATS, Imported, import_files, only_given
from stoker.job.importers.config_reader import NOT_SET
from stoker.job.importers.write import origin, short
from stoker.job.paths import exists

OUTPUT = "-o JOB"
LONGEST = 44  # characters of a value in the table
PIPED = 200  # characters of a line in a pipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker import``."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="the file to convert, Accelerate or DeepSpeed files that belong to it, and key=value for keys of the job",
    )
    parser.add_argument(
        "--from", dest="format", metavar="FORMAT", help=f"format of the first FILE: {', '.join(FORMATS)}"
    )
    parser.add_argument("--data-info", metavar="FILE", help="LLaMA-Factory's dataset_info.json, or its folder")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of processes of the original run, if no FILE gives it"
    )
    parser.add_argument("--only-given", action="store_true", help="do not read further files that a FILE refers to")
    parser.add_argument("-o", "--output", default="-", metavar="JOB", help="job file to write (default: -, stdout)")
    parser.add_argument("--json", action="store_true", help="print the job and the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Imports the files. Raises UserError for unreadable files, and for a job file that exists."""
    overrides = [word for word in arguments.files if _is_override(word)]
    files = [word for word in arguments.files if not _is_override(word)]
    if not files:
        raise UserError(Problem("no file is given", "write `stoker import FILE`"))
    if arguments.processes is not None and arguments.processes < 1:
        raise UserError(Problem(f"--processes {arguments.processes}: at least one process trains", "write 1 or more"))
    if arguments.output != "-" and Path(arguments.output).exists():
        raise already_exists(arguments.output, option=OUTPUT)
    try:
        register = [] if arguments.data_info is None else [arguments.data_info]
        with only_given([*files, *register]) if arguments.only_given else nullcontext():
            imported = import_files(
                files,
                format=arguments.format,
                data_info=arguments.data_info,
                processes=arguments.processes,
                overrides=overrides,
            )
    except UserError as error:
        if not arguments.json:
            raise
        print(json.dumps({"job": None, "errors": [asdict(problem) for problem in error.problems]}, indent=2))
        return error.exit_code
    if arguments.output != "-":
        write_new(arguments.output, imported.text, option=OUTPUT)
    if arguments.json:
        print(json.dumps(_answer(imported), indent=2))
        return 0
    if arguments.output == "-":
        sys.stdout.write(imported.text)
    _report(imported)
    if arguments.output != "-":
        print(f"{arguments.output} written; next: stoker check {shlex.quote(arguments.output)}")
    return 0


def _is_override(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and "/" not in key and not exists(Path(word))


def _answer(imported: Imported) -> dict[str, Any]:
    carried = [item for item in imported.carried if item.key]
    defaults = [item for item in imported.carried if not item.key and item.tool]
    return {
        "tools": list(imported.tools),
        "job": imported.job,
        "yaml": imported.text,
        "carried": [
            {
                "key": item.key,
                "value": item.given,
                "to": item.target,
                "as": item.value,
                "note": item.note.strip(),
                "where": item.where,
            }
            for item in carried
        ],
        "defaults": [
            {"to": item.target, "as": item.value, "of": item.tool, "note": item.note.strip()} for item in defaults
        ],
        "dropped": [asdict(item) for item in imported.dropped],
        "unknown": [asdict(item) for item in imported.unknown],
        "missing": list(imported.missing),
    }


def _report(imported: Imported) -> None:
    """Prints the table on stderr: every key of the files, and its conversion."""
    terminal = sys.stderr.isatty()
    console = Console(stderr=True, highlight=False, width=None if terminal else PIPED)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("key", "value", "became", "why"):
        table.add_column(head, overflow="fold")
    for item in imported.carried:
        if item.key:
            note = item.note.strip()
            became = f"{item.target}: {short(item.value, LONGEST)}"
            table.add_row(*map(escape, (item.key, short(item.given, LONGEST), became, note)))
    for item in imported.carried:
        if not item.key and item.tool:
            table.add_row("", "", escape(f"{item.target}: {short(item.value, LONGEST)}"), escape(origin(item)))
    for dropped in imported.dropped:
        if dropped.why != NOT_SET:
            became = "[red]lost[/red]" if dropped.matters else "[dim]not needed[/dim]"
            table.add_row(escape(dropped.key), escape(short(dropped.value, LONGEST)), became, escape(dropped.why))
    for unknown in imported.unknown:
        near = f"similar: {unknown.near}" if unknown.near else ""
        table.add_row(escape(unknown.key), escape(short(unknown.value, LONGEST)), "[red]unknown[/red]", escape(near))
    console.print(table)
    carried = sum(1 for item in imported.carried if item.key)
    lost = sum(1 for item in imported.dropped if item.matters)
    console.print(
        f"{' + '.join(imported.tools)}: {carried} converted, {len(imported.dropped) - lost} not needed, "
        f"{lost} lost, {len(imported.unknown)} unknown"
    )
    for key in imported.missing:
        console.print(f"`{key}` is not set in any file: replace the example with your own value", style="bold")
