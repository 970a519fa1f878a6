"""Audit a job's data: rows used, truncated and dropped, with the reason; sequences with trained tokens marked."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.cli.options.stage_options import asks_for_stages
from stoker.cli.output.amounts import pluralise
from stoker.cli.output.print_problems import print_problems
from stoker.cli.preflight import open_job, open_stages
from stoker.errors import Problem, UserError, placed_errors
from stoker.job import LoadedJob
from stoker.job.load_job import STAGES
from stoker.job.stage import Stage
from stoker.job.stages import read_stages
from stoker.job.task_spec import TASKS, task_of

if TYPE_CHECKING:
    from stoker.data.audit import Audit
    from stoker.data.files.rows import Rejected
    from stoker.data.ranking.log_audit import LogAudit
    from stoker.data.sample_preview import SequencePreview

SAMPLES = 3
AnyAudit = TypeVar("AnyAudit", "Audit", "LogAudit")


@dataclass(frozen=True)
class _Shown:
    """An audit with the requested sequences.

    Attributes:
        dropped: requested rows that were dropped.
        packed: sequences as the run packs them; None if they were not requested.
        total: number of those per epoch; None for no end.
    """

    audit: Audit
    dropped: Sequence[Rejected] = ()
    packed: Sequence[SequencePreview] | None = None
    total: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the output of ``--json``."""
        if self.packed is None:
            return self.audit.as_json()
        packed = [{**asdict(each), "tokens": each.tokens} for each in self.packed]
        return self.audit.as_json() | {"packed": packed, "packed_sequences": self.total}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker data``."""
    parser.add_argument("job", metavar="JOB", help="the job file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the job to override")
    parser.add_argument("--only", metavar="STAGE", help="the stage of a job with stages")
    parser.add_argument("--json", action="store_true", help="print the audit as JSON, and nothing else")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, metavar="N", help=f"number of sequences to show (default: {SAMPLES})"
    )
    parser.add_argument("--offset", type=int, metavar="N", help="index of the first sequence to show, counted from 0")
    parser.add_argument(
        "--packed",
        action="store_true",
        help="show the packed sequences that the run trains on, in its order",
    )
    parser.add_argument(
        "--rows",
        action="append",
        default=[],
        metavar="SOURCE:ROW",
        help="show this row, or the reason why it was dropped; repeatable",
    )


def run(arguments: argparse.Namespace) -> int:
    """Audits and prints; returns 2 where the data must not be trained on."""
    try:
        stage = _chosen_stage(arguments)
        loaded = (
            open_job(arguments.job, arguments.overrides, "open") if stage is None else open_stages([stage], "open")[0]
        )
        is_log = task_of(loaded.job).ranks
        wanted = _wanted_rows(arguments, is_log=is_log)
        with nullcontext() if stage is None else placed_errors(stage.placed_one):
            if is_log:
                from stoker.cli.output.quiet_libraries import quiet_libraries

                quiet_libraries()
                from stoker.train.ranking.job_log import audit_of

                return _run_log(arguments, _placed(audit_of(loaded, Path.cwd(), wanted), stage))
            shown = _shown(arguments, loaded, wanted)
        shown = replace(shown, audit=_placed(shown.audit, stage))
    except UserError as error:
        if not arguments.json:
            raise
        answer = {"ok": False, "errors": [asdict(problem) for problem in error.problems]}
        print(json.dumps(answer, ensure_ascii=False))
        return error.exit_code
    audit = shown.audit
    if arguments.json:
        print(json.dumps(shown.as_json(), ensure_ascii=False))
    else:
        from stoker.cli.output.data_view import print_audit

        print_audit(audit, shown.dropped, shown.packed or ())
        if shown.packed is not None and shown.total is not None and len(shown.packed) < arguments.samples:
            epoch = pluralise(shown.total, "sequence")
            print(f"\nan epoch has {epoch}; further epochs have the same rows in another order")
    return _end(audit.problems)


def _chosen_stage(arguments: argparse.Namespace) -> Stage | None:
    """Returns the stage that ``--only`` names; None for a job without stages."""
    if not asks_for_stages(arguments.job, only=arguments.only):
        return None
    staged = read_stages(arguments.job, arguments.overrides)
    if arguments.only is None:
        hint = f"write `--only STAGE`: one of {', '.join(stage.name for stage in staged.stages)}"
        raise UserError(staged.document.problem((STAGES,), "each stage of this file has its own data", hint))
    return staged.chosen(only=arguments.only, begin=None)[0]


def _placed(audit: AnyAudit, stage: Stage | None) -> AnyAudit:
    """Returns an audit with the places of its problems in the file of a stage."""
    return audit if stage is None else replace(audit, problems=tuple(stage.placed(audit.problems)))


def _run_log(arguments: argparse.Namespace, audit: LogAudit) -> int:
    """Prints the audit of a click log."""
    from stoker.cli.output.log_audit_view import print_log_audit

    if arguments.json:
        print(json.dumps(audit.as_json(), ensure_ascii=False))
    else:
        print_log_audit(audit)
    return _end(audit.problems)


def _end(problems: Sequence[Problem]) -> int:
    """Prints the problems, and returns the exit code."""
    sys.stdout.flush()
    print_problems(problems)
    return UserError.exit_code if problems else 0


def _wanted_rows(arguments: argparse.Namespace, *, is_log: bool) -> list[tuple[str, int]]:
    """Returns the requested rows, each as its file and its number there.

    Args:
        is_log: whether the data are a click log.

    Raises:
        UserError: an option is wrong, or contradicts another one or the data.
    """
    if is_log and (arguments.packed or arguments.samples != SAMPLES or arguments.offset is not None):
        hint = "omit them; --rows FILE:ROW shows a row, and dropped rows are always listed"
        raise UserError(Problem("--packed, --samples and --offset show tokens; this is a click log", hint))
    wanted = [_place(text) for text in arguments.rows]
    if arguments.samples < 0:
        raise UserError(Problem("--samples must be at least 0", "write how many sequences to show"))
    if arguments.offset is not None and (arguments.offset < 0 or wanted):
        raise UserError(
            Problem("--offset must be at least 0, and cannot be used with --rows", "sequences are counted from 0")
        )
    if arguments.packed and wanted:
        raise UserError(Problem("--packed cannot be used with --rows", "select packed sequences with --offset"))
    return wanted


def _shown(arguments: argparse.Namespace, loaded: LoadedJob, wanted: list[tuple[str, int]]) -> _Shown:
    """Returns the audit with the requested sequences."""
    if not task_of(loaded.job).text:
        message = f"`task: {loaded.job.task}` brings its own dataset: there are no rows to audit"
        *others, last = (name for name, task in TASKS.items() if task.text)
        raise UserError(loaded.problem("task", message, f"`stoker data` is for {', '.join(others)} and {last}"))
    return _open(loaded, wanted, arguments.samples, arguments.offset, packed=arguments.packed)


def _place(text: str) -> tuple[str, int]:
    source, _, row = text.rpartition(":")
    if not source or not row.isdecimal():
        raise UserError(Problem(f"--rows {text}: this is not a row", "write it as my.jsonl:12"))
    return source, int(row)


def _open(loaded: LoadedJob, wanted: list[tuple[str, int]], samples: int, begin: int | None, *, packed: bool) -> _Shown:
    from stoker.cli.output.quiet_libraries import quiet_libraries
    from stoker.cli.output.tokenise_report import TokeniseReport

    quiet_libraries()
    from stoker.data.audit import audit
    from stoker.data.corpus import open_corpus
    from stoker.data.sample_preview import SamplePreview, samples_from, samples_of, sequences_from
    from stoker.models.text import open_text_side
    from stoker.train.language.token_rows import missing_rows_of_job

    base = Path.cwd()
    text = open_text_side(loaded, base)
    found: list[SamplePreview] = []
    dropped: list[Rejected] = []
    with TokeniseReport() as report:
        corpus = open_corpus(loaded.job, text.codec, seq_len=text.seq_len, base=base, report=report, loaded=loaded)
        corpus.read_whole()
    missing = missing_rows_of_job(loaded, text, corpus, base)

    def audited(shown: int) -> Audit:
        found = audit(corpus, text.codec, loaded, shown)
        return found if missing is None else replace(found, problems=(*found.problems, missing))

    if packed:
        sequences, total = sequences_from(corpus, text.codec, begin or 0, samples)
        return _Shown(audited(0), packed=sequences, total=total)
    for file, row in wanted:
        of_row, rejected = samples_of(corpus, text.codec, file, row)
        if not of_row and not rejected:
            names = ", ".join(source.source.name for source in (*corpus.sources, *corpus.evaluation))
            raise UserError(Problem(f"--rows {file}:{row}: there is no such row", f"the sources are {names}"))
        found += of_row
        dropped += rejected
    if begin is not None:
        found = samples_from(corpus.sources, text.codec, begin, samples)
    if not wanted and begin is None:
        return _Shown(audited(samples))
    return _Shown(replace(audited(0), samples=tuple(found)), dropped)
