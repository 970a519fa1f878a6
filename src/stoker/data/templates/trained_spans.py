"""Spans of trained tokens (the loss mask), and the windows of a row that fit into a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from stoker.data.files.row_batch import Span
from stoker.data.templates.encode import Encoded

Cut = Literal["cut", "drop", "split"]
TOO_LONG = "too long"
NO_ROOM = "nothing left to train on"
SAME_CUT = "chosen and rejected are the same after the cut"
SAME_TOKENS = "chosen and rejected have the same tokens"
LONG_PROMPT = "the prompt is too long"


def mark_trained(encoded: Encoded, stop_ids: frozenset[int]) -> tuple[list[Span], bool]:
    """Converts spans of trained characters to spans of trained tokens.

    A span is trained up to its last stop token: the model never writes what a template adds after it (such as a line
    feed). A token that spans the start of a span belongs to the prompt.

    Args:
        encoded: the ids of a text, and the positions of its answers (start, end, start, end ...).
        stop_ids: tokens that end an answer.

    Returns:
        The spans, and whether no token crosses the start of one.
    """
    ids, places = encoded
    spans, exact = [], True
    for (first, over), (end, _) in zip(places[::2], places[1::2], strict=True):
        exact = exact and not over
        last = next((i + 1 for i in range(end - 1, first - 1, -1) if ids[i] in stop_ids), end)
        if last > first:
            spans.append((first, last))
    return spans, exact


def split_into_windows(
    length: int, trained: Sequence[Span], seq_len: int, too_long: Cut, *, sampled: int = 0
) -> tuple[list[Span], str]:
    """Splits a row of ``length`` tokens into windows of at most ``seq_len``; returns them, or a reason.

    The first token of a sequence is never predicted, so a window must have a trained token after its first.
    Windows of a split row overlap by one token, so that every token but the row's first is predicted once.

    Args:
        sampled: most tokens of an answer that the model samples after the prompt, the tokens before the trained ones.
    """
    if sampled and trained and trained[0][0] > seq_len - sampled:
        reason = f"{LONG_PROMPT}: {trained[0][0]} tokens, and train.seq_len less max_tokens is {seq_len - sampled}"
        return [], reason
    if length <= seq_len:
        windows = [(0, length)]
    elif too_long == "drop":
        return [], f"{TOO_LONG}: {length} tokens, train.seq_len is {seq_len}"
    elif too_long == "cut":
        windows = [(0, seq_len)]
    else:
        windows = [(i, min(length, i + seq_len)) for i in range(0, length - 1, seq_len - 1)]
    kept = [(a, b) for a, b in windows if any(max(first, a + 1) < min(last, b) for first, last in trained)]
    if kept:
        return kept, ""
    if length > seq_len:
        return [], f"{NO_ROOM}: its first {seq_len} of {length} tokens have no answer, raise train.seq_len"
    return [], "too short: nothing to predict" if length < 2 else "nothing to train on"


def spans_in_window(trained: Sequence[Span], first: int, last: int) -> list[Span]:
    """Returns the trained spans of a window, counted from its start.

    The first token of a later window is not among them: the window before predicted it.
    """
    begin = first + 1 if first else 0
    clipped = [(max(a, begin) - first, min(b, last) - first) for a, b in trained]
    return [(a, b) for a, b in clipped if a < b]
