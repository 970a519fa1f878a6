"""Terminal view of a data audit: counts, reasons, lengths, and sequences with trained tokens marked."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stoker.cli.output.amounts import pluralise
from stoker.terminal import escape_control_characters

if TYPE_CHECKING:
    from rich.text import Text

    from stoker.console import Console
    from stoker.data.audit import Audit
    from stoker.data.files.rows import Rejected
    from stoker.data.sample_preview import SamplePreview, SequencePreview

PLACES = 20  # rows listed per reason, and ignored fields listed
BAR = 40  # characters of the longest bar
TRAINED = "bold green"
OPEN, CLOSE = "⟦", "⟧"  # around trained text without colour


def print_audit(audit: Audit, dropped: Sequence[Rejected], packed: Sequence[SequencePreview]) -> None:
    """Prints an audit, requested rows that were dropped, and sequences."""
    from stoker.console import Console
    from stoker.data.mixture_report import in_words

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without these brackets still shows the rest
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for label, value in _counts(audit):
        print(f"{label:<20} {value}")
    for part in audit.mixture:
        print(f"{'in this run':<20} {in_words([part])}")
    _print_ignored(audit)
    print_dropped(audit.reasons, audit.dropped)
    _print_histogram(audit)
    for rejected in dropped:
        print(f"\n{rejected.source}:{rejected.row}: dropped: {escape_control_characters(rejected.reason)}")
    if not audit.samples and not packed:
        return
    if not audit.prompts:
        print()
        _say(_legend(), f"trained tokens are between {OPEN} and {CLOSE}", console)
    for sample in audit.samples:
        print()
        _print_sample(sample, console)
    for sequence in packed:
        filled = pluralise(sequence.tokens, "token")
        if sequence.capacity is not None:
            filled = f"{sequence.tokens:,} of {pluralise(sequence.capacity, 'token')}"
        print(f"\n=== sequence {sequence.number:,}: {pluralise(len(sequence.documents), 'row')}, {filled}")
        for document in sequence.documents:
            _print_sample(document, console)


def _print_sample(sample: SamplePreview, console: Console) -> None:
    verdict = f" {sample.verdict}:" if sample.verdict else ""
    tokens = pluralise(len(sample.ids), "token")
    print(f"--- {sample.source}:{sample.row}:{verdict} {tokens}, {sum(sample.trained):,} trained")
    _say(coloured(sample), bracketed(sample), console)
    if sample.expected is not None:
        print(f"expected answer: {escape_control_characters(sample.expected)}")
    if sample.lost:
        print(f"... {pluralise(sample.lost, 'token')} truncated")
    if sample.continues:
        print("... continues in the next sequence")


def _counts(audit: Audit) -> list[tuple[str, str]]:
    """Returns the table of the audit: (label, count)."""
    trained = f"{audit.trained_tokens:,} ({audit.trained_tokens / (audit.tokens or 1):.1%})"
    dropped = audit.rows_dropped / audit.rows_in if audit.rows_in else 0.0
    prefix = "an exact prefix of the whole text in every row"
    if audit.prompt_not_prefix:
        prefix = f"not an exact prefix of the whole text in {pluralise(audit.prompt_not_prefix, 'row')}"
    stop = "trained" if audit.stop_token_trained else "never trained"
    if audit.stop_token_trained and audit.stop_missing:
        stop = f"trained, but missing after the last answer of {pluralise(audit.stop_missing, 'row')}"
    both = f"{pluralise(audit.contradictions, 'answer')} labelled both good and bad, and trained on as both"
    counts = [(name, f"format {format_}") for name, format_ in audit.formats.items()]
    counts += [
        ("rows read", f"{audit.rows_in:,}"),
        ("rows used", f"{audit.rows_used:,}"),
        (
            "rows truncated",
            f"{audit.rows_cut:,}" + (f", {pluralise(audit.tokens_lost, 'token')} lost" if audit.tokens_lost else ""),
        ),
        ("rows split", f"{audit.rows_split:,}"),
        ("rows dropped", f"{audit.rows_dropped:,} ({dropped:.1%})"),
        ("sequences", f"{audit.sequences:,}, {audit.held_out:,} of them held out"),
        ("tokens", f"{audit.tokens:,}; {audit.mean:.1f} per sequence, at most {audit.longest:,}"),
        ("trained tokens", "none of the prompts, but the policy's own answers" if audit.prompts else trained),
        *([] if audit.prompts else [("stop token", stop)]),
        ("prompts", prefix),
        *([("weight 0", f"{audit.turns_untrained:,} answers are not trained")] if audit.turns_untrained else []),
        ("duplicates", f"{audit.duplicates:,}"),
        *([("labels", both)] if audit.contradictions else []),
        ("overlap", f"{audit.overlap:,} training sequences are also evaluated"),
    ]
    encoded = {"text": "encoded as plain text", "keep": "kept as control tokens"}
    counts += [
        ("special tokens", f"{count:,} in content, {encoded[policy]} ({source})")
        for source, count, policy in audit.special_tokens
    ]
    rows, lost = audit.evaluation_rows
    return [*counts, ("evaluation rows", f"{rows:,}, {lost:,} dropped")] if rows else counts


def _print_ignored(audit: Audit) -> None:
    if not audit.fields_ignored:
        return
    print("\nfields that are not used in the text or the mask:")
    for ignored in audit.fields_ignored[:PLACES]:
        rows = "row " if ignored.rows == 1 else "rows"
        print(f"  {ignored.rows:>9,} {rows}  {escape_control_characters(ignored.field)}  ({ignored.source})")
    if len(audit.fields_ignored) > PLACES:
        print(f"  and {pluralise(len(audit.fields_ignored) - PLACES, 'field')} more")


def print_dropped(reasons: Mapping[str, int], dropped: Sequence[Rejected]) -> None:
    """Prints the number of dropped rows by reason, and the first rows of each."""
    from stoker.data.dropped_rows import reason_kind

    for reason, count in reasons.items():
        print(f"\ndropped: {escape_control_characters(reason)} ({count:,})")
        here = [rejected for rejected in dropped if reason_kind(rejected.reason) == reason]
        for rejected in here[:PLACES]:
            detail = rejected.reason.removeprefix(reason).removeprefix(":").strip()
            print(f"  {rejected.source}:{rejected.row}" + (f"  {escape_control_characters(detail)}" if detail else ""))
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
    """Prints in colour on a terminal, plain in a pipe."""
    if console.is_terminal:
        console.print(coloured)
    else:
        print(plain)


def _legend() -> Text:
    from rich.text import Text

    return Text.assemble("tokens in ", ("green", TRAINED), " are trained, ", ("dim", "dim"), " ones are not")


def coloured(sample: SamplePreview) -> Text:
    """Formats the sequence for a terminal: trained tokens in colour."""
    from rich.text import Text

    parts = zip(sample.tokens, sample.trained, strict=True)
    return Text.assemble(
        *((escape_control_characters(token), TRAINED if trained else "dim") for token, trained in parts)
    )


def bracketed(sample: SamplePreview) -> str:
    """Formats the sequence for a pipe: trained text in brackets."""
    out: list[str] = []
    inside = False
    for token, trained in zip(sample.tokens, sample.trained, strict=True):
        if trained != inside:
            out.append(OPEN if trained else CLOSE)
            inside = trained
        out.append(escape_control_characters(token))
    return "".join([*out, CLOSE if inside else ""])
