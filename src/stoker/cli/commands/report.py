"""Write runs as one self-contained HTML file: curves, events, evaluations and jobs."""

from __future__ import annotations

import argparse
from pathlib import Path

from stoker.errors import Problem, RunFailed, UserError

LANGUAGES = ("en", "zh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker report``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or its name below runs/")
    parser.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="file to write (default: report.html)"
    )
    parser.add_argument(
        "--language", choices=LANGUAGES, help="language of the report (default: the language of the browser)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the file; an existing HTML file is replaced."""
    from stoker.files import replace_file, unwritable
    from stoker.page.run_data.report_answers import report_answers
    from stoker.page.run_data.report_html import report_html
    from stoker.runs.find_run import find_run
    from stoker.runs.run_folder import RunFolder

    path = Path(arguments.output)
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(Problem(f"{path} is not the name of an HTML file", "write `-o report.html`"))
    if not path.absolute().parent.is_dir():
        raise UserError(Problem(f"-o {path}: there is no folder {path.parent}", "create it, or give another -o"))
    if what := unwritable(path.absolute().parent):
        raise UserError(Problem(f"-o {path}: {path.parent} {what}", "give another -o"))
    folders = [RunFolder(find_run(name, Path.cwd()).path.resolve()) for name in arguments.runs]
    unique = list({folder.path: folder for folder in folders}.values())
    text = report_html(report_answers(unique), arguments.language or "")
    try:
        replace_file(path, text)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {error.strerror}") from error
    runs = "1 run" if len(unique) == 1 else f"{len(unique)} runs"
    print(f"{path}: {runs}, {len(text.encode()) / 1e6:.1f} MB; it needs no server")
    return 0
