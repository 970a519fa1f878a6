"""Restart a submitted run from its newest checkpoint."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from stoker.cli.submitted_options import add_submitted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker resume``."""
    add_submitted(parser)
    parser.add_argument("--json", action="store_true", help="print the record as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Resumes the run; returns 0 once the target has accepted the job."""
    from stoker.cluster.record import save_record
    from stoker.cluster.submitted_run import submitted_run

    found = submitted_run(arguments.run, arguments.on)
    record = found.target.resume(found.record)
    save_record(record)
    if arguments.json:
        print(json.dumps(asdict(record)))
    else:
        started = record.handle.get("started") or record.handle.get("words", record.output)
        print(f"{record.name} resumes: {started}")
    return 0
