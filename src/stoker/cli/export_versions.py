"""The versions of a store of tables: listed, and rolled back."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime


def list_versions(arguments: argparse.Namespace) -> int:
    """Prints the versions of a store, with a mark at the current one."""
    from stoker.online_store.store_writers import existing_store, store_errors

    writer = existing_store(arguments.versions)
    with store_errors(arguments.versions):
        current, versions = writer.current(), writer.versions()
    if arguments.json:
        found = [{"version": v.number, "current": v.number == current, **v.info} for v in versions]
        print(json.dumps(found))
        return 0
    for version in versions:
        made = datetime.fromtimestamp(version.info["made"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        mark = "*" if version.number == current else " "
        print(f"{mark} {version.number:>6}  {made} UTC  {version.info['run']}, step {version.info['step']}")
    if not versions:
        print("no version")
    return 0


def roll_back_store(arguments: argparse.Namespace) -> int:
    """Makes an earlier version the current one."""
    from stoker.online_store.store_writers import existing_store, roll_back, shown_place, store_errors

    writer = existing_store(arguments.rollback)
    with store_errors(arguments.rollback):
        before, now = roll_back(writer, arguments.version)
    if arguments.json:
        print(json.dumps({"before": before, "now": now}))
    else:
        print(f"{shown_place(arguments.rollback)}: version {before} -> {now}")
    return 0
