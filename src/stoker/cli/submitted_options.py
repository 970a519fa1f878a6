"""Arguments of the commands for submitted runs."""

from __future__ import annotations

import argparse


def add_submitted(parser: argparse.ArgumentParser) -> None:
    """Adds ``RUN`` and ``--on``."""
    parser.add_argument("run", metavar="RUN", help="name of the submitted run, or its folder")
    parser.add_argument(
        "--on", metavar="TARGET", help="look the run up in this target's records, for runs submitted elsewhere"
    )


def name_of(run: str) -> str:
    """Returns the name of a run's folder: ``runs/mine`` -> ``mine``."""
    from stoker.cluster.submission import name_of as name_of_output

    return name_of_output(run)
