"""Audit a job's data: every row used, cut or dropped and why; what the model sees, trained tokens marked."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cli.preflight import open_job
from stoker.errors import Problem, UserError
from stoker.job import LoadedJob
from stoker.job.task_spec import TASKS, task_of
from stoker.terminal import visible

if TYPE_CHECKING:
    from rich.text import Text

    from stoker.console import Console
    from stoker.data.audit import Audit
    from stoker.data.ranking.log_audit import LogAudit
    from stoker.data.rows import Rejected
    from stoker.data.shown_samples import ShownSample

SAMPLES = 3
PLACES = 20  # rows named for each reason, and fields that are ignored
BAR = 40  # characters of the longest bar
TRAINED = "bold green"
OPEN, CLOSE = "⟦", "⟧"  # around trained text where there is no colour


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``stoker data``."""
    parser.add_argument("job", metavar="JOB", help="the job file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    parser.add_argument("--json", action="store_true", help="print the audit as JSON, and nothing else")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, metavar="N", help=f"sequences shown (default: {SAMPLES})"
    )
    parser.add_argument("--offset", type=int, metavar="N", help="show the sequences from the N-th on, counted from 0")
    parser.add_argument(
        "--rows",
        action="append",
        default=[],
        metavar="SOURCE:ROW",
        help="show this row instead, or why it was dropped; may be given several times",
    )


def run(arguments: argparse.Namespace) -> int:
    """Audit and print; returns 2 where the data must not be trained on as it is."""
    try:
        loaded = open_job(arguments.job, arguments.overrides)
        if (of_log := task_of(loaded.job).audit) is not None:
            from stoker.cli.report import quiet_libraries

            quiet_libraries()
            return _run_log(arguments, of_log(loaded, Path.cwd()))
        audit, dropped = _audit(arguments, loaded)
    except UserError as error:
        if not arguments.json:
            raise
        answer = {"ok": False, "errors": [asdict(problem) for problem in error.problems]}
        print(json.dumps(answer, ensure_ascii=False))
        return error.exit_code
    if arguments.json:
        print(json.dumps(audit.as_json(), ensure_ascii=False))
    else:
        _print(audit, dropped)
    sys.stdout.flush()
    for problem in audit.problems:
        print(f"error: {problem}", file=sys.stderr)
    return UserError.exit_code if audit.problems else 0


def _run_log(arguments: argparse.Namespace, audit: LogAudit) -> int:
    """Prints the audit of a click log."""
    from stoker.cli.log_audit_view import print_log_audit

    if arguments.rows:
        raise UserError(Problem("--rows shows tokens, and this is a click log", "dropped rows are named without it"))
    if arguments.json:
        print(json.dumps(audit.as_json(), ensure_ascii=False))
    else:
        print_log_audit(audit)
    sys.stdout.flush()
    for problem in audit.problems:
        print(f"error: {problem}", file=sys.stderr)
    return UserError.exit_code if audit.problems else 0


def _audit(arguments: argparse.Namespace, loaded: LoadedJob) -> tuple[Audit, list[Rejected]]:
    """The audit, with the samples that were asked for, and those asked-for rows that were dropped."""
    wanted = [_place(text) for text in arguments.rows]
    if arguments.samples < 0:
        raise UserError(Problem("--samples is below 0", "write how many sequences to show"))
    if arguments.offset is not None and (arguments.offset < 0 or wanted):
        raise UserError(Problem("--offset is below 0, or stands beside --rows", "sequences are counted from 0"))
    if not task_of(loaded.job).text:
        message = f"`task: {loaded.job.task}` brings its own dataset: there are no rows to audit"
        *others, last = (name for name, task in TASKS.items() if task.text)
        raise UserError(loaded.problem("task", message, f"`stoker data` is for {', '.join(others)} and {last}"))
    begin = arguments.offset
    audit, found, dropped = _open(loaded, wanted, 0 if wanted else arguments.samples, begin)
    return (replace(audit, samples=tuple(found)) if wanted or begin is not None else audit), dropped


def _place(text: str) -> tuple[str, int]:
    source, _, row = text.rpartition(":")
    if not source or not row.isdecimal():
        raise UserError(Problem(f"--rows {text}: this names no row", "write it as my.jsonl:12"))
    return source, int(row)


def _open(
    loaded: LoadedJob, wanted: list[tuple[str, int]], samples: int, begin: int | None
) -> tuple[Audit, list[ShownSample], list[Rejected]]:
    from stoker.cli.report import TokeniseReport, quiet_libraries

    quiet_libraries()
    from stoker.data.audit import audit
    from stoker.data.corpus import open_corpus
    from stoker.data.shown_samples import samples_from, samples_of
    from stoker.models.text import open_text_side

    base = Path.cwd()
    text = open_text_side(loaded, base)
    found: list[ShownSample] = []
    dropped: list[Rejected] = []
    with TokeniseReport() as report:
        corpus = open_corpus(loaded.job, text.codec, seq_len=text.seq_len, base=base, report=report, loaded=loaded)
        try:
            for source in corpus.sources:
                _ = source.cache.rows  # of a stream, every row is looked at too
        finally:
            corpus.close()
    for file, row in wanted:
        sequences, rejected = samples_of(corpus, text.codec, file, row)
        if not sequences and not rejected:
            names = ", ".join(source.source.name for source in (*corpus.sources, *corpus.evaluation))
            raise UserError(Problem(f"--rows {file}:{row}: there is no such row", f"the sources are {names}"))
        found += sequences
        dropped += rejected
    if begin is not None:
        found = samples_from(corpus, text.codec, begin, samples)
    return audit(corpus, text.codec, loaded, 0 if begin is not None else samples), found, dropped


def _print(audit: Audit, dropped: list[Rejected]) -> None:
    from stoker.console import Console
    from stoker.data.mixture_report import in_words

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no brackets still shows the rest
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for label, value in _counts(audit):
        print(f"{label:<20} {value}")
    for part in audit.drawn:
        print(f"{'in this run':<20} {in_words([part])}")
    _print_ignored(audit)
    _print_reasons(audit)
    _print_histogram(audit)
    for rejected in dropped:
        print(f"\n{rejected.source}:{rejected.row}: dropped: {visible(rejected.reason)}")
    if not audit.samples:
        return
    print()
    _say(_legend(), f"trained tokens are between {OPEN} and {CLOSE}", console)
    for sample in audit.samples:
        trained = sum(sample.trained)
        verdict = f" {sample.verdict}:" if sample.verdict else ""
        print(f"\n--- {sample.source}:{sample.row}:{verdict} {len(sample.ids)} tokens, {trained} trained")
        _say(coloured(sample), bracketed(sample), console)


def _counts(audit: Audit) -> list[tuple[str, str]]:
    """The table of the audit: what, how many."""
    share = audit.trained_tokens / audit.tokens if audit.tokens else 0.0
    dropped = audit.rows_dropped / audit.rows_in if audit.rows_in else 0.0
    prefix = "an exact prefix of the whole in every row"
    if audit.prompt_not_prefix:
        prefix = f"not an exact prefix of the whole in {audit.prompt_not_prefix:,} rows"
    stop = "trained" if audit.stop_token_trained else "never trained"
    if audit.stop_token_trained and audit.stop_missing:
        stop = f"trained, but missing behind the last answer of {audit.stop_missing:,} rows"
    counts = [(name, f"format {format_}") for name, format_ in audit.formats.items()]
    counts += [
        ("rows in", f"{audit.rows_in:,}"),
        ("rows used", f"{audit.rows_used:,}"),
        ("rows cut", f"{audit.rows_cut:,}"),
        ("rows split", f"{audit.rows_split:,}"),
        ("rows dropped", f"{audit.rows_dropped:,} ({dropped:.1%})"),
        ("sequences", f"{audit.sequences:,}, {audit.held_out:,} of them held out"),
        ("tokens", f"{audit.tokens:,}; {audit.mean:.1f} a sequence, the longest has {audit.longest:,}"),
        ("trained tokens", f"{audit.trained_tokens:,} ({share:.1%})"),
        ("stop token", stop),
        ("prompts", prefix),
        *([("weight 0", f"{audit.turns_untrained:,} answers are not trained")] if audit.turns_untrained else []),
        ("duplicates", f"{audit.duplicates:,}"),
        ("evaluated too", f"{audit.overlap:,} training sequences"),
    ]
    encoded = {"text": "encoded as the text that they are", "keep": "kept as control tokens"}
    counts += [
        ("special tokens", f"{count:,} inside of content, {encoded[policy]} ({source})")
        for source, count, policy in audit.special_tokens
    ]
    rows, lost = audit.evaluation_rows
    return [*counts, ("evaluation rows", f"{rows:,}, {lost:,} dropped")] if rows else counts


def _print_ignored(audit: Audit) -> None:
    if not audit.fields_ignored:
        return
    print("\nfields that are given and never reach the text or the mask:")
    for ignored in audit.fields_ignored[:PLACES]:
        print(f"  {ignored.rows:>9,} rows  {visible(ignored.field)}  ({ignored.source})")
    if len(audit.fields_ignored) > PLACES:
        print(f"  and {len(audit.fields_ignored) - PLACES:,} fields more")


def _print_reasons(audit: Audit) -> None:
    from stoker.data.token_cache import reason_kind

    for reason, count in audit.reasons.items():
        print(f"\ndropped: {visible(reason)} ({count:,})")
        here = [rejected for rejected in audit.dropped if reason_kind(rejected.reason) == reason]
        for rejected in here[:PLACES]:
            detail = rejected.reason.removeprefix(reason).removeprefix(":").strip()
            print(f"  {rejected.source}:{rejected.row}" + (f"  {visible(detail)}" if detail else ""))
        if count > PLACES:
            print(f"  and {count - min(len(here), PLACES):,} more")


def _print_histogram(audit: Audit) -> None:
    if not audit.length_histogram:
        return
    print("\ntokens up to   sequences")
    most = max(audit.length_histogram.values())
    for bound, count in audit.length_histogram.items():
        print(f"{bound:>12,}   {count:>9,}  {'█' * max(1, round(BAR * count / most))}")


def _say(coloured: Text, plain: str, console: Console) -> None:
    """Prints with colours on a terminal, plain in a pipe."""
    if console.is_terminal:
        console.print(coloured)
    else:
        print(plain)


def _legend() -> Text:
    from rich.text import Text

    return Text.assemble("tokens in ", ("green", TRAINED), " are trained, ", ("dim", "dim"), " ones are not")


def coloured(sample: ShownSample) -> Text:
    """The sequence for a terminal: trained tokens in colour."""
    from rich.text import Text

    parts = zip(sample.tokens, sample.trained, strict=True)
    return Text.assemble(*((visible(token), TRAINED if trained else "dim") for token, trained in parts))


def bracketed(sample: ShownSample) -> str:
    """The sequence for a pipe: trained text between brackets."""
    out: list[str] = []
    inside = False
    for token, trained in zip(sample.tokens, sample.trained, strict=True):
        if trained != inside:
            out.append(OPEN if trained else CLOSE)
            inside = trained
        out.append(visible(token))
    return "".join([*out, CLOSE if inside else ""])
