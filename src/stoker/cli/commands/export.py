"""Export a run as an adapter (peft), merged weights (transformers), GGUF (llama.cpp) or ranking model; verify it."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.options.run_options import add_at, add_trust, trusted
from stoker.cli.output.amounts import size_text
from stoker.errors import DiskFailed, Problem, UserError

if TYPE_CHECKING:
    from stoker.runs.run_folder import RunFolder

FORMATS = ("adapter", "merged", "gguf", "ranking")
QUANTISED = ("8bit", "4bit", "int8", "int4")
DTYPE = "data type of the weights: fp32, bf16, fp16; gguf: fp32, fp16, q8_0, q5_1, q5_0, q4_1, q4_0"
KEPT = 3  # versions of a store that are kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker export``."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's folder, or its name below runs/")
    parser.add_argument("--format", choices=FORMATS, help="format of the export")
    parser.add_argument(
        "--to", metavar="DIR", help="the folder to write; ranking: also lmdb://PATH or redis://HOST:PORT/DB"
    )
    parser.add_argument("--dtype", help=DTYPE)
    parser.add_argument("--quantise", choices=QUANTISED, help="quantise merged weights to 8 or 4 bits, int8 or int4")
    parser.add_argument("--keep", type=int, metavar="N", help=f"number of versions kept in a store (default: {KEPT})")
    parser.add_argument("--versions", metavar="URL", help="list the versions in a store")
    parser.add_argument("--rollback", metavar="URL", help="make the previous version in a store current")
    parser.add_argument("--version", type=int, metavar="N", help="with --rollback: make this version current")
    add_at(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exports and replays; the export counts only if the replay succeeds."""
    if arguments.rollback or arguments.versions:
        _check_store_only(arguments)
        from stoker.cli.export_versions import list_versions, roll_back_store

        return (roll_back_store if arguments.rollback else list_versions)(arguments)
    for name, value in (("RUN", arguments.run), ("--format", arguments.format), ("--to", arguments.to)):
        if value is None:
            raise UserError(Problem(f"{name} is missing", "stoker export RUN --format FORMAT --to DIR"))
    if arguments.version is not None:
        raise UserError("--version needs --rollback")
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()
    if arguments.format == "ranking":
        return _ranking(arguments)
    if arguments.keep is not None:
        raise UserError("--keep is the number of versions in a store: give it with --format ranking")
    if "://" in arguments.to:
        raise UserError(f"--to {arguments.to}: {arguments.format} is written to a folder")
    from stoker.runs.find_run import find_run

    base = Path.cwd()
    find_run(arguments.run, base)  # before the heavy imports
    from stoker.checkpoint.export.claim_target import claimed_target
    from stoker.checkpoint.export.export_run import export_run
    from stoker.checkpoint.export.write_export import Export, check_request
    from stoker.checkpoint.load_run import job_of_run, open_run

    export = Export(arguments.format, base / arguments.to, arguments.dtype, arguments.quantise)
    check_request(job_of_run(arguments.run, base, trusted(arguments))[1].job, export)
    with claimed_target(export.to):
        _say(f"opening {arguments.run}")
        tuned = open_run(arguments.run, base, at=arguments.at, trusted=trusted(arguments))
        done = export_run(tuned, export, base, _say)
    line, written = done.verified.line, str(done.written)
    _record(tuned.folder, format=export.format, to=written, step=tuned.step, verified=line)
    size = f" ({size_text(done.written.stat().st_size)})" if done.written.is_file() else ""
    if arguments.json:
        answer = {"written": written, "step": tuned.step, "verified": line, "loss": done.verified.as_json()}
        answer |= {"base": done.base, "warnings": done.warnings}
        print(json.dumps(answer | ({"quantised": done.drift} if done.drift else {})))
    else:
        print("\n".join(filter(None, (f"step {tuned.step} -> {written}{size}", line, done.drift))))
    for warning in done.warnings:
        print(f"WARNING: {warning}", file=sys.stderr)
    return 0


def _say(stage: str) -> None:
    """Prints a stage of the export on stderr; stdout has its result."""
    print(f"{stage} ...", file=sys.stderr, flush=True)


def _record(folder: RunFolder, **values: Any) -> None:
    """Adds the export to the run's events, where they can be written: the export is complete without them."""
    try:
        folder.event("exported", **values)
    except DiskFailed as error:
        print(f"WARNING: the run's events do not have this export: {error}", file=sys.stderr)


def _check_store_only(arguments: argparse.Namespace) -> None:
    """Raises UserError if --versions or --rollback is given with an option that it does not use."""
    own = "--rollback" if arguments.rollback else "--versions"
    for name in ("run", "format", "to", "dtype", "quantise", "keep", *(["version"] if own == "--versions" else [])):
        if getattr(arguments, name) is not None:
            raise UserError(f"{'RUN' if name == 'run' else f'--{name}'} has no effect with {own}: remove it")
    if arguments.at != "last":
        raise UserError(f"--at has no effect with {own}: remove it")
    if arguments.rollback and arguments.versions:
        raise UserError("--versions has no effect with --rollback: remove it")


def _ranking(arguments: argparse.Namespace) -> int:
    """Exports a model of another kind than language models, through its task."""
    from stoker.checkpoint.export.claim_target import claimed_target
    from stoker.job.load_job import load_job
    from stoker.job.task_spec import task_of
    from stoker.runs.find_run import find_run

    for name in ("dtype", "quantise"):
        if getattr(arguments, name):
            raise UserError(f"--{name}: a ranking model keeps the precision it was trained in")
    keep = KEPT if arguments.keep is None else arguments.keep
    if keep < 1:
        raise UserError("--keep must be at least 1")
    if arguments.keep is not None and "://" not in arguments.to:
        raise UserError(f"--keep has no effect: {arguments.to} is a folder, which has one version")
    base = Path.cwd()
    folder = find_run(arguments.run, base)
    task = task_of(load_job(folder.job).job)
    if not task.ranks:
        if not task.exports:
            raise UserError(f"task {task.name} has no export: its weights are in the checkpoints")
        raise UserError(f"task {task.name} is not exported as ranking: write {' or '.join(task.exports)}")
    from stoker.train.ranking.export_ranking import export_ranking

    with nullcontext() if "://" in arguments.to else claimed_target(base / arguments.to):
        folder, done = export_ranking(
            arguments.run, arguments.to, at=arguments.at, trusted=trusted(arguments), base=base, keep=keep, say=_say
        )
    line = "; ".join(done.lines)
    _record(folder, format="ranking", to=done.written, step=done.step, version=done.version, verified=line)
    if arguments.json:
        answer = {"written": done.written, "step": done.step, "version": done.version, "rows": done.rows}
        print(json.dumps({**answer, "verified": line, "warnings": [done.warning] if done.warning else []}))
    else:
        version = "" if done.version is None else f", version {done.version}"
        print("\n".join((f"step {done.step} -> {done.written}{version}", *done.lines)))
    if done.warning:
        print(f"WARNING: {done.warning}", file=sys.stderr)
    return 0
