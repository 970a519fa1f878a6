"""Measure a run on data: loss, perplexity, token accuracy over the trained tokens."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stoker.cli.trust_options import add_trust, trusted
from stoker.errors import UserError

QUANTISED = ("8bit", "4bit", "int8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``stoker eval``."""
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its name below runs/")
    parser.add_argument(
        "data",
        nargs="?",
        metavar="DATA",
        help="file, folder, hub id or catalogue name; by default the held-out rows",
    )
    parser.add_argument("--format", default="auto", help="the format of DATA (default: found from its rows)")
    parser.add_argument("--at", default="last", metavar="CHECKPOINT", help="last, best, or a step (default: last)")
    parser.add_argument("--compare", action="store_true", help="measure the model without the tuning as well")
    parser.add_argument(
        "--quantise", choices=QUANTISED, help="measure the merged model in 8 or 4 bits, or as int8 or int4, as well"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print."""
    from stoker.cli.report import TokeniseReport, quiet_libraries

    quiet_libraries()
    from stoker.checkpoint.load_run import open_run
    from stoker.train.evaluate_run import measure

    base = Path.cwd()
    if arguments.data is not None:
        _check(arguments, base)
    tuned = open_run(arguments.run, base, at=arguments.at, trusted=trusted(arguments))
    with TokeniseReport() as report:
        results = measure(
            tuned,
            arguments.data,
            arguments.format,
            base,
            compare=arguments.compare,
            quantise=arguments.quantise,
            report=report,
        )
    if arguments.json:
        print(
            json.dumps(
                {name: result.as_json() for name, result in results.items()} | {"step": tuned.step}
                if arguments.compare or arguments.quantise
                else results["tuned"].as_json() | {"step": tuned.step}
            )
        )
        return 0
    for name, result in results.items():
        label = f"step {tuned.step}" if name == "tuned" else name
        found = result.evaluation
        numbers = [f"loss {found.loss:.4f}"]
        numbers += [f"perplexity {found.perplexity:.2f}"] if found.perplexity is not None else []
        numbers += [f"{found.target} accuracy {found.accuracy:.1%}"] if found.accuracy is not None else []
        numbers += [f"{result.bits_per_byte:.4f} bits a byte"] if result.bits_per_byte is not None else []
        rows = f"{result.rows_used} rows; {result.rows_dropped} dropped"
        print(f"{label:<10} {'  '.join(numbers)}  ({found.targets:,} trained {found.target}s of {rows})")
    return 0


def _check(arguments: argparse.Namespace, base: Path) -> None:
    from stoker.data.sources import source_problem
    from stoker.job.schema import SourceBlock

    formats = SourceBlock.model_fields["format"].annotation.__args__  # type: ignore[union-attr]
    if arguments.format not in formats:
        raise UserError(f"--format {arguments.format}: there is no such format; write one of {', '.join(formats)}")
    problem = source_problem(SourceBlock(path=arguments.data), base)
    if problem:
        raise UserError("; ".join(problem))
