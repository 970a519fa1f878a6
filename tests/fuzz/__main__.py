"""Gives Stoker spoilt jobs, data and models, as `make fuzz` does, and counts how it takes them.

Exit code 1 where one of them ended in a traceback, a signal or a hang. ``--only NAME`` runs one case again.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from data_cases import data_cases
from fixtures import write_data, write_models
from forked import Case, Outcome, run_cases
from job_cases import job_cases
from model_cases import model_cases

BAD = ("traceback", "killed", "hang")
KINDS = {"jobs": (job_cases, 20.0), "data": (data_cases, 30.0), "models": (model_cases, 60.0)}
PLACE = re.compile(r"^error: (.*:\d+:\d+|command line): ", re.M)


def main() -> int:
    """Run the fuzzers; print a line for each kind and each bad case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1000, metavar="N")
    parser.add_argument("--data", type=int, default=300, metavar="N")
    parser.add_argument("--models", type=int, default=80, metavar="N")
    parser.add_argument("--workers", type=int, default=2, help="cases at a time (default: 2)")
    parser.add_argument(
        "--only", metavar="NAME", help="one case, such as job-0-17, its output shown and its files kept"
    )
    parser.add_argument("--verbose", action="store_true", help="the last line of every case")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-fuzz-") as temporary:
        folder = Path(temporary)
        _prepare(folder)
        if arguments.only:
            return _again(arguments.only, folder)
        bad = 0
        for kind in KINDS:
            bad += _fuzz(kind, arguments, folder)
    return 1 if bad else 0


def _prepare(folder: Path) -> None:
    """Loads what every case needs once, and writes the fixtures in a process of their own."""
    os.environ.update(
        STOKER_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1"
    )
    fixtures = folder / "fixtures"
    fixtures.mkdir()
    write_data(fixtures)
    import torch
    import transformers.models.auto.modeling_auto
    import transformers.models.auto.tokenization_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import stoker.checkpoint.load_run
    import stoker.cli.commands.check
    import stoker.cli.output.quiet_libraries
    import stoker.train.run

    torch.set_num_threads(1)
    stoker.cli.output.quiet_libraries.quiet_libraries()
    made = list(run_cases([Case("made", partial(_make, fixtures))], folder, limit=120, workers=1))
    if made[0].kind != "accepted":
        raise SystemExit(made[0].text)
    gc.freeze()


def _make(fixtures: Path) -> int:
    write_models(fixtures)
    return 0


def _fuzz(kind: str, arguments: argparse.Namespace, folder: Path) -> int:
    cases, limit = KINDS[kind]
    count = getattr(arguments, kind)
    started = time.monotonic()
    counts: Counter[str] = Counter()
    unplaced, slowest = 0, 0.0
    made = cases(arguments.seed, count, folder / "fixtures")
    for outcome in run_cases(made, folder, limit=limit, workers=arguments.workers):
        counts[outcome.kind] += 1
        slowest = max(slowest, outcome.seconds)
        unplaced += kind == "jobs" and outcome.kind == "refused" and not PLACE.search(outcome.text)
        if outcome.kind in BAD or arguments.verbose:
            print(f"{outcome.case:<14} {outcome.kind:<10} {outcome.seconds:5.1f} s  {_last_line(outcome)}", flush=True)
    names = ("accepted", "refused", "late", "failed", *BAD)
    said = ", ".join(f"{counts[name]} {name}" for name in names)
    without = f" ({unplaced} of the refused without a place)" if kind == "jobs" else ""
    seconds = time.monotonic() - started
    print(f"{kind}: {count} cases: {said}{without}; slowest {slowest:.1f} s, {seconds:.0f} s in all", flush=True)
    return sum(counts[name] for name in BAD)


def _again(name: str, folder: Path) -> int:
    begin, seed, number = name.split("-")
    kind = {"job": "jobs", "data": "data", "model": "models"}[begin]
    cases, limit = KINDS[kind]
    case = [case for case in cases(int(seed), int(number) + 1, folder / "fixtures") if case.name == name]
    kept = Path.cwd() / "fuzzed"
    (outcome,) = run_cases(case, kept, limit=limit, workers=1, keep=True)
    print(outcome.text)
    print(f"{name}: {outcome.kind} after {outcome.seconds:.1f} s; its files are in {kept / name}")
    return 1 if outcome.kind in BAD else 0


def _last_line(outcome: Outcome) -> str:
    lines = [line for line in outcome.text.splitlines() if line.strip()]
    return repr(lines[-1][:150]) if lines else ""


if __name__ == "__main__":
    sys.exit(main())
