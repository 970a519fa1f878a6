"""The option that selects one of a run's checkpoints."""

from __future__ import annotations

import argparse


def add_at(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--at``."""
    meaning = "checkpoint: last (default), best, a step, or average (averaged weights of train.average)"
    parser.add_argument("--at", default="last", metavar="CHECKPOINT", help=meaning)
