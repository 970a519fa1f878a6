"""Options of commands on a run: the checkpoint, and permission to execute code, which its job.yaml cannot give."""

from __future__ import annotations

import argparse

from stoker.job.resolved import ResolvedJob
from stoker.job.trust import TRUST, option_of


def add_at(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--at``."""
    meaning = "checkpoint: last (default), best, a step, or average (averaged weights of train.average)"
    parser.add_argument("--at", default="last", metavar="CHECKPOINT", help=meaning)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds the options ``--trust-remote-code`` and ``--allow-pickle``."""
    parser.add_argument("--trust-remote-code", action="store_true", help="run modelling code that comes with the model")
    parser.add_argument("--allow-pickle", action="store_true", help="load pickled weights, which can execute code")


def trusted(arguments: argparse.Namespace) -> list[str]:
    """Returns the trusted keys as overrides of the run's job."""
    return [f"model.{name}=true" for name in TRUST if getattr(arguments, name)]


def options_of(job: ResolvedJob) -> str:
    """Returns the trust options, each after a space, that other commands need for a run of the user's own job."""
    given = [name for name in TRUST if job.model is not None and getattr(job.model, name)]
    return "".join(f" {option_of(name)}" for name in given)
