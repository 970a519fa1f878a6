"""Tokenises rows and marks the trained tokens.

A row goes through four steps: its bytes are decoded, its columns parsed as a conversation or a document, the
conversation rendered by the chat template, the text encoded. Each step may refuse it with a reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stoker.data.files.readers import decode
from stoker.data.files.row_batch import EncodedBatch, EncodedBatchBuilder, Span, digest_of
from stoker.data.files.rows import Conversation, Example, Preference, Ranking, Raw, Rejected, Text
from stoker.data.formats import all_formats as formats
from stoker.data.formats.expected_answer import prompt_and_expected
from stoker.data.formats.pair_formats import MOST_PAIRS
from stoker.data.templates import template_sandbox
from stoker.data.templates.chat_template import BUILT_IN, Rendered
from stoker.data.templates.encode import Encoded
from stoker.data.templates.render_row import RenderedRow, render_example, turns_of
from stoker.data.templates.special_text import SpecialText
from stoker.data.templates.trained_spans import (
    SAME_CUT,
    SAME_TOKENS,
    Cut,
    mark_trained,
    spans_in_window,
    split_into_windows,
)
from stoker.data.text_codec import TextCodec

JUDGED_BAD = "the label says that the answer is bad"
NO_EXPECTED = "no expected answer, with which a reward compares"
UNUSABLE = "a reward cannot compare with the expected answer"


@dataclass(frozen=True)
class RowSettings:
    """The settings that affect a row's tokens, in addition to the tokenizer."""

    format: str
    columns: tuple[tuple[str, str], ...]
    train_on: str
    too_long: Cut
    seq_len: int
    special_tokens: Literal["text", "keep"] = "keep"  # how special tokens in content are encoded
    keep_bad: bool = False  # whether answers with a bad label are kept, with their label
    prompts: bool = False  # whether the model answers the rows itself
    expected_check: Callable[[Any], str] | None = None  # why rewards cannot compare; empty if they can
    sampled: int = 0  # most tokens of an answer that the model samples after the row's prompt


@dataclass(frozen=True)
class _Pending:
    """A row on its way to tokens.

    Attributes:
        place: its number in the chunk.
        special: set if the content holds special tokens that are encoded as text.
        texts: its renderings; for a preference or a ranking, one for each answer with its prompt.
    """

    place: int
    example: Example
    special: SpecialText | None
    texts: tuple[Rendered, ...] = ()


@dataclass(frozen=True)
class _EncodedText:
    """A rendering's ids, the spans of its trained tokens, and whether its prompts are exact prefixes."""

    ids: list[int]
    trained: list[Span]
    exact: bool


def tokenise(rows: Sequence[Raw | Rejected], codec: TextCodec, settings: RowSettings) -> EncodedBatch:
    """Decodes, parses, renders and encodes a chunk of rows. Every row comes out as tokens or as a reason."""
    out, builder = EncodedBatch(), EncodedBatchBuilder()
    others = [row.others if isinstance(row, Raw) else () for row in rows]
    out.rows_in = len(rows) + sum(map(len, others))
    reasons: dict[int, str] = {}  # of dropped rows, by place
    parsed: list[_Pending] = []
    for place, row in enumerate(rows):
        item = row.reason if isinstance(row, Rejected) else _parse(place, row, codec, settings, out)
        if isinstance(item, str):
            reasons[place] = item
        else:
            parsed.append(item)
    rendered: list[_Pending] = []
    for item, outcome in zip(parsed, _render(parsed, codec, settings.train_on), strict=True):
        out.ignored.update(outcome.ignored)
        out.turns_untrained += outcome.untrained
        if outcome.texts:
            rendered.append(replace(item, texts=outcome.texts))
        else:
            reasons[item.place] = outcome.reason
    for item, texts in zip(rendered, _encode(rendered, codec), strict=True):
        row = rows[item.place]
        if reason := _add_sequences(item.example, texts, (row.source, row.row), codec, settings, out, builder):
            reasons[item.place] = reason
    builder.into(out)
    for place, reason in sorted(reasons.items()):
        row = rows[place]
        out.dropped += [Rejected(row.source, number, reason) for number in (row.row, *others[place])]
    return out


def _parse(place: int, raw: Raw, codec: TextCodec, settings: RowSettings, out: EncodedBatch) -> _Pending | str:
    """Decodes and parses a row; counts its ignored fields and special tokens. Returns the reason if it is dropped."""
    value = decode(raw)
    if isinstance(value, Rejected):
        return value.reason
    names = dict(settings.columns)
    example, ignored = formats.read(value, settings.format, names, prompts=settings.prompts)
    if isinstance(example, Conversation) and example.good is not None and not settings.keep_bad:
        ignored = [*ignored, names.get("label", "label")]  # it decides about the row but is not in the text
    if isinstance(example, Conversation) and example.after:
        ignored = [*ignored, "turns after the last answer"]
    if isinstance(example, Ranking) and example.sampled:
        ignored = [*ignored, f"pairs above {MOST_PAIRS:,} of one prompt"]
    out.ignored.update(ignored)
    if isinstance(example, str):
        return example
    count = _special_tokens_in(example, codec.special_text)
    out.special_tokens += count
    if isinstance(example, Conversation) and example.good is False and not settings.keep_bad:
        return JUDGED_BAD
    if settings.expected_check is not None and isinstance(example, Conversation) and isinstance(value, dict):
        expected = prompt_and_expected(example, value)[1]
        if expected is None:
            return NO_EXPECTED
        if reason := settings.expected_check(expected):
            return f"{UNUSABLE}: {reason}"
    return _Pending(place, example, codec.special_text if count and settings.special_tokens == "text" else None)


def _special_tokens_in(example: Example, special: SpecialText) -> int:
    """Counts the special tokens in a row's content."""
    if isinstance(example, Text):
        return special.count(example.text)
    turns = turns_of(example)
    count = special.count("\0".join(turn.content for turn in turns))
    return count + special.count(example.tools) + sum(special.count(turn.extra) for turn in turns if turn.extra)


def _render(pending: Sequence[_Pending], codec: TextCodec, train_on: str) -> Iterator[RenderedRow]:
    """Renders rows. A document is its own text."""
    chats = [(item.example, item.special) for item in pending if not isinstance(item.example, Text)]
    if codec.template.source in BUILT_IN.values():
        outcomes = [render_example(codec.template, example, train_on, special) for example, special in chats]
    else:
        outcomes = template_sandbox.render_examples(codec.template, chats, train_on)
    rendered = iter(outcomes)
    for item in pending:
        if isinstance(item.example, Text):
            text = item.example.text
            plain = text if item.special is not None else None
            yield RenderedRow((Rendered(text, (), exact_prefix=True, separated=plain),))
        else:
            yield next(rendered)


def _encode(pending: Sequence[_Pending], codec: TextCodec) -> Iterator[list[_EncodedText]]:
    """Encodes the texts of rows."""
    texts = [(rendered, isinstance(item.example, Text)) for item in pending for rendered in item.texts]
    groups: dict[tuple[bool, bool], list[int]] = defaultdict(list)
    for i, (rendered, document) in enumerate(texts):
        groups[document, rendered.separated is None].append(i)
    found: dict[int, _EncodedText] = {}
    for (document, _), members in groups.items():
        group = [texts[i][0] for i in members]
        written = [rendered.written for rendered in group]
        encoder = codec.encoder_of(group[0])
        if document:
            for i, ids in zip(members, encoder.encode_documents(written), strict=True):
                if codec.end_id is not None and ids[-1:] != [codec.end_id]:
                    ids.append(codec.end_id)
                found[i] = _EncodedText(ids, [(0, len(ids))], exact=True)
            continue
        places = [[place for span in rendered.spans for place in span] for rendered in group]
        for i, rendered, encoded in zip(members, group, encoder.encode(written, places), strict=True):
            spans, whole = mark_trained(encoded, codec.stop_ids)
            exact = whole and rendered.exact_prefix and _same_when_asked(encoded, rendered, codec)
            found[i] = _EncodedText(encoded[0], spans, exact)
    numbers = iter(range(len(texts)))
    for item in pending:
        yield [found[next(numbers)] for _ in item.texts]


def _add_sequences(
    example: Example,
    texts: Sequence[_EncodedText],
    place: tuple[str, int],
    codec: TextCodec,
    settings: RowSettings,
    out: EncodedBatch,
    builder: EncodedBatchBuilder,
) -> str:
    """Adds the sequences of a row to the builder; returns the reason if the row is dropped, else an empty text."""
    fits = [
        split_into_windows(len(text.ids), text.trained, settings.seq_len, settings.too_long, sampled=settings.sampled)
        for text in texts
    ]
    longest = max(len(text.ids) for text in texts)
    out.longest = max(out.longest, longest)
    if reason := next((reason for _, reason in fits if reason), ""):
        return reason
    kept = [text.ids[: windows[-1][1]] for text, (windows, _) in zip(texts, fits, strict=True)]
    sequences = list(_texts_of_sequences(example, [text.ids for text in texts], kept))
    if not sequences:
        return f"{SAME_CUT}: train.seq_len is {settings.seq_len}" if longest > settings.seq_len else SAME_TOKENS
    if isinstance(example, Ranking) and len(sequences) < 2 * len(example.pairs):
        out.ignored.update(["pairs of answers with the same tokens"])
    out.rows_cut += longest > settings.seq_len and settings.too_long == "cut"
    out.rows_split += longest > settings.seq_len and settings.too_long != "cut"
    for number, margin, digest in sequences:
        text, (windows, _) = texts[number], fits[number]
        for first, last in windows:
            spans = spans_in_window(text.trained, first, last)
            builder.add(
                text.ids[first:last],
                spans,
                place,
                stops=text.ids[first + spans[-1][1] - 1] in codec.stop_ids,
                lost=len(text.ids) - last if settings.too_long == "cut" else 0,
                continues=(first, last) != windows[-1],
                exact=text.exact,
                good=not (isinstance(example, Conversation) and example.good is False),
                margin=margin,
                digest=digest,
            )
    return ""


def _texts_of_sequences(
    example: Example, ids: Sequence[Sequence[int]], kept: Sequence[Sequence[int]]
) -> Iterator[tuple[int, float, int | None]]:
    """Yields the number of each text that becomes a sequence, the margin of its pair, and the digest if not its ids'.

    Each pair of a ranking has its better and its worse answer, as in InstructGPT (Ouyang et al., 2022, section 3.5).
    The exclusive or of their digests is the same for all pairs of a row, so that these are held out together, and no
    prompt is on both sides.

    Args:
        kept: the ids that are left after the cut. A pair of texts that have the same is left out.
    """
    if isinstance(example, Ranking):
        of_row = digest_of(ids)
        for pair, (better, worse, margin) in enumerate(example.pairs):
            if kept[better] == kept[worse]:
                continue
            digest = digest_of([*ids, [pair]])
            yield better, margin, digest
            yield worse, margin, digest ^ of_row
    elif not isinstance(example, Preference):
        yield 0, 0.0, None
    elif kept[0] != kept[1]:
        yield from ((number, example.margin, None) for number in (0, 1))


def _same_when_asked(encoded: Encoded, rendered: Rendered, codec: TextCodec) -> bool:
    """Returns whether prompts that end in several spaces keep their tokens when no answer follows.

    Everywhere else a token boundary is enough: the text before it was merged separately. But how a run of white space
    is split may depend on the text after it.
    """
    ids, places = encoded
    for (start, _), (first, _) in zip(rendered.spans, places[::2], strict=True):
        if rendered.text[max(0, start - 2) : start].isspace() and start > 1:
            asked = codec.encoder_of(rendered).encode_one(rendered.written[:start])
            if asked != ids[:first]:
                return False
    return True
