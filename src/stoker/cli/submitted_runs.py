"""Table of submitted runs, each with its state from the target."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING

from stoker.cli.output.text_table import print_table
from stoker.errors import UserError

if TYPE_CHECKING:
    from stoker.cluster.record import Record
    from stoker.cluster.target import Status, Target

AT_ONCE = 8  # targets queried concurrently


def print_submitted_runs(on: str | None, *, as_json: bool) -> int:
    """Prints the runs that this user has submitted, or those that a target knows; the newest first."""
    from stoker.cluster.chosen_target import named_target
    from stoker.cluster.record import all_records
    from stoker.cluster.target import open_target

    target = None if on is None else open_target(named_target(on))
    records = all_records() if target is None else sorted(target.records(), key=lambda record: -record.time)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        states = list(pool.map(lambda record: state_of(record, target), records))
    if as_json:
        both = zip(records, states, strict=True)
        print(json.dumps([{**asdict(r), "status": asdict(s)} for r, s in both], indent=2))
        return 0
    if not records:
        print("no run was submitted; `stoker submit JOB --on TARGET` submits one")
        return 0
    rows = []
    for record, status in zip(records, states, strict=True):
        place = f"{record.kind} ({record.on})" if record.on else record.kind
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.time))
        name = f"{record.name} ({', '.join(record.stages)})" if record.stages else record.name
        rows.append((name, place, f"{record.nodes} x {record.devices}", status.state, status.why, when))
    print_table(("run", "target", "nodes", "state", "why", "submitted"), rows)
    return 0


def state_of(record: Record, target: Target | None = None) -> Status:
    """Returns the state of a run; ``lost`` with the reason where its target cannot be reached.

    Args:
        target: the one to ask; None for that of the record. Its address may hold only where the run was submitted.
    """
    from stoker.cluster.submitted_run import target_of
    from stoker.cluster.target import Status

    try:
        return (target or target_of(record)).status(record)
    except UserError as error:
        return Status("lost", str(error.problems[0]))
