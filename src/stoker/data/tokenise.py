"""Rows into tokens, with the trained ones marked.

A row goes through four steps: its bytes are decoded, its columns read as a conversation or a document, the
conversation rendered by the chat template, the text encoded. Each step may refuse it with a reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from tokenizers import Tokenizer

from stoker.data import formats, template_sandbox
from stoker.data.chat_template import (
    BUILT_IN,
    ChatTemplate,
    Rendered,
    TemplateRefused,
)
from stoker.data.encode import Encoded, Encoder
from stoker.data.readers import decode
from stoker.data.render_row import Outcome, render_example, separated, turns_of
from stoker.data.row_batch import Columns, EncodedBatch, Span, Tokenised
from stoker.data.rows import Conversation, Example, Preference, Raw, Rejected, Text
from stoker.data.special_text import Inseparable, SpecialText
from stoker.data.templates import template_of
from stoker.job.schema import SourceBlock

__all__ = ["Cut", "EncodedBatch", "RowSettings", "TextCodec", "Tokenised", "fit", "mark_trained", "tokenise"]

T = TypeVar("T")
Cut = Literal["cut", "drop", "split"]
JUDGED_BAD = "the label says that the answer is bad"
TOO_LONG = "too long"
NO_ROOM = "nothing left to train on"


@dataclass(frozen=True)
class TextCodec:
    """All that data needs to know of a tokenizer; it travels to worker processes.

    Attributes:
        definition: the content of ``tokenizer.json``.
        template: the chat template, with the special tokens it may name.
        stop_ids: tokens that end an answer when the model is served.
        end_id: the token put after a document of plain text; None where the tokenizer has none.
        vocabulary: number of ids, added tokens included.
    """

    definition: str
    template: ChatTemplate
    stop_ids: frozenset[int]
    end_id: int | None
    vocabulary: int

    @cached_property
    def encoder(self) -> Encoder:
        """Encodes texts; made once in each process."""
        return Encoder(self.definition)

    @cached_property
    def special_text(self) -> SpecialText:
        """Special tokens in content; made once in each process."""
        return SpecialText(self.definition)

    def encoder_of(self, rendered: Rendered) -> Encoder:
        """What encodes a rendered text."""
        return self.encoder if rendered.separated is None else self.special_text.encoder

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer itself, without truncation and padding."""
        return self.encoder.tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("encoder", "special_text")}

    def for_source(self, block: SourceBlock, base: Path) -> TextCodec:
        """The codec with the chat template of a source and its arguments.

        Raises:
            UserError: see `stoker.data.templates.template_of`.
        """
        source = template_of(block, base, own=self.template.source)
        return replace(self, template=replace(self.template, source=source))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything here that decides tokens."""
        digest = hashlib.blake2b(digest_size=16)
        parts = (self.definition, self.template.source, repr(self.template.special_tokens))
        for part in (*parts, repr(sorted(self.stop_ids)), repr(self.end_id)):
            digest.update(part.encode() + b"\x00")
        return digest.hexdigest()


@dataclass(frozen=True)
class RowSettings:
    """What decides the tokens of a row, beside the tokenizer."""

    format: str
    columns: tuple[tuple[str, str], ...]
    train_on: str
    too_long: Cut
    seq_len: int
    special_tokens: Literal["text", "keep"] = "keep"  # what those inside of content are


@dataclass(frozen=True)
class _Pending:
    place: int  # in the chunk
    raw: Raw
    texts: tuple[Rendered, ...]  # of a preference, both answers with their prompt
    document: bool = False
    example: Conversation | Preference | None = None  # to be rendered
    special: SpecialText | None = None  # where the content holds special tokens that are to be text


def tokenise(raws: Iterable[Raw | Rejected], codec: TextCodec, settings: RowSettings) -> EncodedBatch:
    """Decodes, parses, renders and encodes a chunk of rows. Every row comes out as tokens or as a reason."""
    out, columns = EncodedBatch(), Columns()
    dropped: dict[int, Rejected] = {}
    prepared: list[_Pending] = []
    names = dict(settings.columns)
    for place, raw in enumerate(raws):
        out.rows_in += 1
        if isinstance(raw, Rejected):
            dropped[place] = raw
            continue
        item = _prepare(place, raw, codec, settings, names, out)
        if isinstance(item, Rejected):
            dropped[place] = item
        else:
            prepared.append(item)
    outcomes = iter(_render(prepared, codec, settings.train_on))
    pending: list[_Pending] = []
    for item in prepared:
        if item.example is None:
            pending.append(item)
            continue
        outcome = next(outcomes)
        out.ignored.update(outcome.ignored)
        out.turns_untrained += outcome.untrained
        if outcome.texts:
            pending.append(replace(item, texts=outcome.texts))
        else:
            dropped[item.place] = Rejected(item.raw.source, item.raw.row, outcome.reason)
    encoded = iter(_encode(pending, codec))
    for item in pending:
        texts = [next(encoded) for _ in item.texts]
        fits = [fit(len(ids), trained, settings.seq_len, settings.too_long) for ids, trained, _ in texts]
        out.longest = max(out.longest, *(len(ids) for ids, _, _ in texts))
        if reason := next((reason for _, reason in fits if reason), ""):
            dropped[item.place] = Rejected(item.raw.source, item.raw.row, reason)
            continue
        too_long = any(len(ids) > settings.seq_len for ids, _, _ in texts)
        out.rows_cut += too_long and settings.too_long == "cut"
        out.rows_split += too_long and settings.too_long != "cut"
        for (ids, trained, exact), (windows, _) in zip(texts, fits, strict=True):
            for first, last in windows:
                spans = _within(trained, first, last)
                columns.add(
                    ids[first:last],
                    spans,
                    (item.raw.source, item.raw.row),
                    stops=ids[first + spans[-1][1] - 1] in codec.stop_ids,
                    cut=len(ids) > settings.seq_len and settings.too_long == "cut",
                    continues=(first, last) != windows[-1],
                    exact=exact,
                )
    columns.into(out)
    out.dropped = [rejected for _, rejected in sorted(dropped.items())]
    return out


def _prepare(
    place: int, raw: Raw, codec: TextCodec, settings: RowSettings, names: dict[str, str], out: EncodedBatch
) -> _Pending | Rejected:
    value = decode(raw)
    if isinstance(value, Rejected):
        return value
    example, ignored = formats.read(value, settings.format, names)
    if isinstance(example, Conversation) and example.good is not None:
        ignored = [*ignored, names.get("label", "label")]  # it decides about the row, the text does not say it
    out.ignored.update(ignored)
    special = _special(example, codec, settings, out)
    if isinstance(example, Text):
        plain = example.text if special is not None else None
        return _Pending(place, raw, (Rendered(example.text, (), exact_prefix=True, separated=plain),), document=True)
    if isinstance(example, Conversation) and example.good is False:
        example = JUDGED_BAD
    if isinstance(example, str):
        return Rejected(raw.source, raw.row, example)
    return _Pending(place, raw, (), example=example, special=special)


def _render(pending: Sequence[_Pending], codec: TextCodec, train_on: str) -> list[Outcome]:
    """What the rows' conversations and preferences are as text."""
    rows = [(item.example, item.special) for item in pending if item.example is not None]
    if codec.template.source in BUILT_IN.values():
        return [render_example(codec.template, example, train_on, special) for example, special in rows]
    return template_sandbox.render_examples(codec.template, rows, train_on)


def _special(example: Example | str, codec: TextCodec, settings: RowSettings, out: EncodedBatch) -> SpecialText | None:
    """Counts the special tokens in a row's content; what makes them text, where there are some and it is asked for."""
    if isinstance(example, str):
        return None
    special, count = codec.special_text, 0
    if isinstance(example, Text):
        count = special.count(example.text)
    else:
        turns = turns_of(example)
        count = special.count("\0".join(turn.content for turn in turns))
        count += special.count(example.tools) + sum(special.count(turn.extra) for turn in turns if turn.extra)
    out.special_tokens += count
    return special if count and settings.special_tokens == "text" else None


def _encode(pending: Sequence[_Pending], codec: TextCodec) -> list[tuple[list[int], list[Span], bool]]:
    """The ids of each text, the spans of its trained tokens, and whether its prompts are exact prefixes."""
    rows = [item.texts[0] for item in pending if item.document]
    documents = iter(_by_encoder(rows, codec, lambda encoder, few: encoder.encode_document([r.written for r in few])))
    chats = [rendered for item in pending if not item.document for rendered in item.texts]

    def encode(encoder: Encoder, few: Sequence[Rendered]) -> list[Encoded]:
        places = [[place for span in rendered.spans for place in span] for rendered in few]
        return encoder.encode([rendered.written for rendered in few], places)

    encoded = iter(zip(_by_encoder(chats, codec, encode), chats, strict=True))
    found: list[tuple[list[int], list[Span], bool]] = []
    for item in pending:
        if item.document:
            ids = next(documents)
            if codec.end_id is not None and ids[-1:] != [codec.end_id]:
                ids.append(codec.end_id)
            found.append((ids, [(0, len(ids))], True))
            continue
        for _ in item.texts:
            tokens, rendered = next(encoded)
            spans, whole = mark_trained(tokens, codec.stop_ids)
            exact = whole and rendered.exact_prefix and _same_when_asked(tokens, rendered, codec)
            found.append((tokens[0], spans, exact))
    return found


def encode_prompt(
    codec: TextCodec, turns: Sequence[dict[str, Any]], special_tokens: Literal["text", "keep"]
) -> list[int]:
    """The ids that a model is asked with, as it was trained.

    Raises:
        TemplateRefused: when the template does not take the turns, or the special tokens in their content.
    """
    text = codec.template.render(turns, prompt=True)
    if special_tokens == "keep" or not codec.special_text.count(list(turns)):
        return codec.encoder.encode_whole(text)
    try:
        plain = separated(codec.template, codec.special_text, text, list(turns), prompt=True)
    except Inseparable as error:
        raise TemplateRefused("it looks for special tokens in content") from error
    return codec.special_text.encoder.encode_whole(plain)


def _by_encoder(
    texts: Sequence[Rendered], codec: TextCodec, encode: Callable[[Encoder, Sequence[Rendered]], list[T]]
) -> list[T]:
    """What `encode` makes of texts, each encoded by its own encoder, in their order."""
    plain = [i for i, rendered in enumerate(texts) if rendered.separated is None]
    if len(plain) == len(texts):
        return encode(codec.encoder, texts)
    others = [i for i, rendered in enumerate(texts) if rendered.separated is not None]
    made = encode(codec.encoder, [texts[i] for i in plain])
    made += encode(codec.special_text.encoder, [texts[i] for i in others])
    return [item for _, item in sorted(zip([*plain, *others], made, strict=True), key=itemgetter(0))]


def mark_trained(encoded: Encoded, stop_ids: frozenset[int]) -> tuple[list[Span], bool]:
    """Spans of trained tokens from where the spans of trained characters begin and end.

    A span is trained up to its last stop token: what a template writes behind it (a line feed, say) is never
    written by the model. A token that reaches over the start of a span belongs to the prompt.

    Args:
        encoded: the ids of a text, and the places of its answers' (start, end, start, end ...).
        stop_ids: tokens that end an answer.

    Returns:
        The spans, and whether no token reaches over a span's start.
    """
    ids, places = encoded
    spans, exact = [], True
    for (first, over), (end, _) in zip(places[::2], places[1::2], strict=True):
        exact = exact and not over
        last = next((i + 1 for i in range(end - 1, first - 1, -1) if ids[i] in stop_ids), end)
        if last > first:
            spans.append((first, last))
    return spans, exact


def _same_when_asked(encoded: Encoded, rendered: Rendered, codec: TextCodec) -> bool:
    """Whether prompts that end in several white spaces have the tokens that they have before an answer.

    Everywhere else a boundary between tokens is enough: what stands left of it was merged by itself. But how
    a run of white space is cut may hang on whether something follows it.
    """
    ids, places = encoded
    for (start, _), (first, _) in zip(rendered.spans, places[::2], strict=True):
        if rendered.text[max(0, start - 2) : start].isspace() and start > 1:
            asked = codec.encoder_of(rendered).encode_whole(rendered.written[:start])
            if asked != ids[:first]:
                return False
    return True


def fit(length: int, trained: Sequence[Span], seq_len: int, too_long: Cut) -> tuple[list[Span], str]:
    """The windows of at most ``seq_len`` tokens that a row of ``length`` tokens gives, or why it gives none.

    The first token of a sequence is never predicted, so a window must have a trained token after its first.
    Windows of a split row overlap by one token, so that every token but the row's first is predicted once.
    """
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


def _within(trained: Sequence[Span], first: int, last: int) -> list[Span]:
    """Trained spans of a window, counted from its start; a later one's first token was predicted before."""
    begin = first + 1 if first else 0
    clipped = [(max(a, begin) - first, min(b, last) - first) for a, b in trained]
    return [(a, b) for a, b in clipped if a < b]
