"""Advice on the rows that a log drops, and the error if no row is left."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stoker.data.dropped_rows import reason_kind
from stoker.data.ranking.column_files import LogSummary, in_words
from stoker.data.ranking.column_store import ColumnStore
from stoker.data.ranking.encode_columns import NOT_NESTED, OTHER_LABEL, OTHER_TIME, column_without_ids
from stoker.data.ranking.features import NUMBERS, Features
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.data.sources import Source
from stoker.errors import Problem, UserError

# Keys of the columns that rows are dropped for, by reason:
KEYS_OF_REASONS = {
    **dict.fromkeys((OTHER_LABEL, NOT_NESTED, "not a label", "no label"), "label"),
    **dict.fromkeys(("not a time", "no time"), "time"),
    "not a weight": "weight",
}
CLICK_FIRST = "write the label of the click before that of the conversion"
HINTS_OF_REASONS = {
    NOT_NESTED: CLICK_FIRST,
    OTHER_TIME: "write all times in one unit",
    "not a label": "labels must be 0 and 1, or numbers with `ranking.positive`",
}
UNREAD_TYPE = re.compile(r"of type (time|timedelta|Timedelta) ")  # types of Parquet that JSON has not


def no_rows(sources: Sequence[tuple[Source, str]]) -> UserError:
    """Returns the error that sources have no rows."""
    return UserError(f"there are no rows in {', '.join(source.name for source, _ in sources)}")


def check_has_rows(
    store: ColumnStore, sources: Sequence[tuple[Source, str]], settings: RankingBlock | None = None
) -> None:
    """Raises UserError if a store has no rows.

    Args:
        settings: of the job whose log it is; None if the rows are only evaluated.
    """
    summary = store.summary
    if summary.rows:
        return
    if not summary.rows_in:
        raise no_rows(sources)
    first = summary.rejected[0]
    key, hint = "", drop_hint(summary, store.features, may_ignore=settings is not None)
    if settings is not None:
        key = KEYS_OF_REASONS.get(next(iter(summary.reasons), ""), "")  # of the most frequent one
        if stated := _stated_number(first.reason, settings):
            key, hint = stated, "write `kind: id`, or remove `kind`"
        elif key == "time" and settings.time is None:
            key, hint = "", "write its column as `ranking.time`, or add the one that was found to `ranking.ignore`"
        elif key and not hint:
            hint = "name another column" if key == "label" else f"name another column, or remove `{key}`"
    kinds = in_words(summary.reasons)
    message = f"all {summary.rows_in:,} rows are dropped: {kinds}; {first.source}:{first.row}: {first.reason}"
    raise UserError(Problem(message, hint, key=f"ranking.{key}" if key else ""))


def _stated_number(reason: str, settings: RankingBlock) -> str:
    """Returns the key of a feature that is stated to be a number, by the reason of a row whose value is none."""
    for index, feature in enumerate(settings.features):
        if feature.kind in NUMBERS and reason.startswith(f"not a number: {feature.name} is "):
            return f"features[{index}].kind"
    return ""


def drop_hint(summary: LogSummary, features: Features, *, may_ignore: bool = True) -> str:
    """Returns the suggestion for dropped rows; empty if there is none for their reasons.

    Args:
        may_ignore: whether the rows are those of a job, whose `ranking.ignore` can be changed.
    """
    if OTHER_LABEL in summary.reasons and features.positive is None:
        return "write `ranking.positive: 4` to take labels of 4 and more as positive"
    for reason, hint in HINTS_OF_REASONS.items():
        if reason in summary.reasons:
            return hint
    most_frequent = next(iter(summary.reasons), "")
    reason = next((row.reason for row in summary.rejected if reason_kind(row.reason) == most_frequent), "")
    column = column_without_ids(reason, features)
    if column is None or not may_ignore:
        return ""
    if UNREAD_TYPE.search(reason):
        return f"cast {column} to numbers or texts, or add it to `ranking.ignore`"
    return f"add {column} to `ranking.ignore`"
