"""Describe a submitted run: its state with the reason, its nodes, the submitted command and its files."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from stoker.cli.options.submitted_options import add_submitted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker describe``."""
    add_submitted(parser)
    parser.add_argument("--json", action="store_true", help="print the description as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Prints the description."""
    from stoker.cluster.submitted_run import submitted_run

    found = submitted_run(arguments.run, arguments.on)
    record, status = found.record, found.target.status(found.record)
    lines = list(found.target.describe(record))
    if arguments.json:
        print(json.dumps({**asdict(record), "status": asdict(status), "lines": lines}))
        return 0
    print(f"{record.name}: {status.state}" + (f", {status.why}" if status.why else ""))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
    print(f"  submitted    {when} from {record.base}")
    print(f"  target       {record.kind}" + (f" ({record.on})" if record.on else ""))
    print(f"  fingerprint  {record.fingerprint[:16]}")
    print(f"  nodes        {record.nodes} x {record.devices} processes")
    print(f"  output       {record.output}")
    for line in lines:
        print(f"  {line}")
    return 0
