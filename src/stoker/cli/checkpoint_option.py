"""The option that selects one of a run's checkpoints."""

from __future__ import annotations

import argparse


def add_at(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--at``."""
    meaning = "last, best, a step, or average: the averaged weights of train.average (default: last)"
    parser.add_argument("--at", default="last", metavar="CHECKPOINT", help=meaning)
