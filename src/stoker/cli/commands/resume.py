"""Restart a submitted run from its newest checkpoint."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from stoker.cli.options.submitted_options import add_submitted
from stoker.errors import Problem, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker resume``."""
    add_submitted(parser)
    parser.add_argument("others", nargs="*", help=argparse.SUPPRESS)  # refused, each with its reason
    parser.add_argument("--json", action="store_true", help="print the record as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Resumes the run; returns 0 once the target has accepted the job."""
    from stoker.cluster.record import save_record
    from stoker.cluster.submitted_run import submitted_run

    for other in arguments.others:
        if "=" not in other:
            raise UserError(Problem(f"{arguments.run} and {other} are two runs", "resume one after another"))
        message = f"{arguments.run} resumes with the job that was submitted, and `{other}` would change it"
        raise UserError(Problem(message, f"`stoker submit JOB {other}` with the same `output` continues the run so"))
    found = submitted_run(arguments.run, arguments.on)
    record = found.target.resume(found.record)
    save_record(record)
    if arguments.json:
        print(json.dumps(asdict(record)))
    else:
        print(f"{record.name} resumes: {record.resumed_words}")
    return 0
