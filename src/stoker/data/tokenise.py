"""Rows into tokens, with the trained ones marked.

Tensor legend: a row is ``ids`` (its tokens) and ``trained`` (one boolean a token: is the model taught to write it).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from stoker.data import formats
from stoker.data.chat import BUILT_IN, ChatTemplate, Rendered, TemplateRefused, compile_template
from stoker.data.readers import decode
from stoker.data.record import Preference, Raw, Rejected, Text
from stoker.errors import UserError

Cut = Literal["cut", "drop", "split"]


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
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "tokenizer"}

    def for_template(self, name: str, base: Path) -> TextCodec:
        """The codec with another chat template: ``auto`` (its own), a built-in name or a Jinja file.

        Raises:
            UserError: when there is no such template, or it is not valid Jinja.
        """
        if name == "auto":
            return self
        source = BUILT_IN.get(name)
        if source is None:
            path = base / name
            if not path.is_file():
                known = ", ".join(["auto", *BUILT_IN])
                raise UserError(f"there is no chat template {name!r}: write one of {known}, or the path of a .jinja file")
            source = path.read_text(encoding="utf-8")
        try:
            compile_template(source)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error
        return replace(self, template=replace(self.template, source=source))

    @cached_property
    def fingerprint(self) -> str:
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


@dataclass(frozen=True)
class Tokenised:
    """One training sequence out of a row.

    Attributes:
        ids: token ids, shape (length,).
        trained: which of them are trained, shape (length,).
        source, row: where the row stands, as the reader counts.
        cut: whether tokens of the row were left out.
        stops: whether its last trained token is a stop token.
        exact_prefix: whether the prompt, as it will be served, is an exact prefix.
    """

    ids: np.ndarray
    trained: np.ndarray
    source: str
    row: int
    cut: bool = False
    stops: bool = False
    exact_prefix: bool = True

    @property
    def digest(self) -> int:
        """64 bits of the content: equal rows have equal digests."""
        return int.from_bytes(hashlib.blake2b(self.ids.tobytes(), digest_size=8).digest(), "little")


@dataclass
class Batch:
    """What a chunk of rows became."""

    rows_in: int = 0
    rows: list[Tokenised] = field(default_factory=list)
    dropped: list[Rejected] = field(default_factory=list)
    rows_cut: int = 0
    rows_split: int = 0


@dataclass(frozen=True)
class _Pending:
    raw: Raw
    text: str
    rendered: Rendered | None


def tokenise(raws: Iterable[Raw | Rejected], codec: TextCodec, settings: RowSettings) -> Batch:
    """Decodes, parses, renders and encodes a chunk of rows. Every row comes out as tokens or as a reason."""
    out = Batch()
    pending: list[_Pending] = []
    for raw in raws:
        out.rows_in += 1
        item = _prepare(raw, codec, settings)
        if isinstance(item, Rejected):
            out.dropped.append(item)
        else:
            pending.append(item)
    for plain in (True, False):
        group = [p for p in pending if (p.rendered is None) == plain]
        # Only conversations need to know which characters a token covers; without, encoding is faster.
        encode = codec.tokenizer.encode_batch_fast if plain else codec.tokenizer.encode_batch
        encodings = encode([p.text for p in group], add_special_tokens=plain) if group else []
        for item, encoding in zip(group, encodings, strict=True):
            _finish(item, encoding, codec, settings, out)
    return out


def _prepare(raw: Raw | Rejected, codec: TextCodec, settings: RowSettings) -> _Pending | Rejected:
    if isinstance(raw, Rejected):
        return raw
    value = decode(raw)
    if isinstance(value, Rejected):
        return value
    example = formats.parse(value, settings.format, dict(settings.columns))
    if isinstance(example, str):
        return Rejected(raw.source, raw.row, example)
    if isinstance(example, Text):
        return _Pending(raw, example.text, None)
    if isinstance(example, Preference):
        return Rejected(raw.source, raw.row, "chosen/rejected pairs are not for this task")
    try:
        messages = [as_template_message(m) for m in example.messages]
        rendered = codec.template.render_trained(messages, example.tools, train_on=settings.train_on)
    except TemplateRefused as error:
        return Rejected(raw.source, raw.row, f"the chat template refuses it: {error}")
    return _Pending(raw, rendered.text, rendered)


def as_template_message(message: Any) -> dict[str, Any]:
    """A message as chat templates read it."""
    return {"role": message.role, "content": message.content, **message.extra}


def _finish(item: _Pending, encoding: Any, codec: TextCodec, settings: RowSettings, out: Batch) -> None:
    ids = np.asarray(encoding.ids, dtype=np.uint32)
    exact = True
    if item.rendered is None:
        if codec.end_id is not None:
            ids = np.append(ids, np.uint32(codec.end_id))
        trained = np.ones(len(ids), dtype=bool)
    else:
        trained, whole = mark_trained(ids, encoding.offsets, item.rendered.spans, codec.stop_ids)
        exact = whole and item.rendered.exact_prefix
    pieces, reason = fit(ids, trained, settings.seq_len, settings.too_long)
    if reason:
        out.dropped.append(Rejected(item.raw.source, item.raw.row, reason))
        return
    cut = settings.too_long == "cut" and len(ids) > settings.seq_len
    out.rows_cut += cut
    out.rows_split += len(ids) > settings.seq_len and not cut
    for piece_ids, piece_trained in pieces:
        last = piece_ids[np.flatnonzero(piece_trained)[-1]]
        out.rows.append(
            Tokenised(
                piece_ids, piece_trained, item.raw.source, item.raw.row, cut, int(last) in codec.stop_ids, exact
            )
        )


def mark_trained(
    ids: np.ndarray, offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], stop_ids: frozenset[int]
) -> tuple[np.ndarray, bool]:
    """Trained tokens from trained characters.

    A span is trained up to its last stop token: what a template writes behind it (a line feed, say) is never
    written by the model. A token that reaches over the start of a span belongs to the prompt.

    Args:
        ids: token ids, shape (length,).
        offsets: (start, end) in characters of each token.
        spans: (start, end) in characters of each answer.
        stop_ids: tokens that end an answer.

    Returns:
        The mask, shape (length,), and whether no token reaches over a span's start.
    """
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = places[:, 0], places[:, 1]
    trained = np.zeros(len(ids), dtype=bool)
    exact = True
    is_stop = np.isin(ids, list(stop_ids))
    for start, end in spans:
        first = int(np.searchsorted(starts, start, side="left"))
        stop = int(np.searchsorted(starts, end, side="left"))
        exact = exact and not (first > 0 and ends[first - 1] > start)
        stops = np.flatnonzero(is_stop[first:stop])
        trained[first : first + int(stops[-1]) + 1 if stops.size else stop] = True
    return trained, exact


def fit(ids: np.ndarray, trained: np.ndarray, seq_len: int, too_long: Cut) -> tuple[list[tuple[np.ndarray, np.ndarray]], str]:
    """The sequences of at most ``seq_len`` tokens that a row gives, or the reason why it gives none.

    The first token of a sequence is never predicted, so a sequence must have a trained token after it.
    """
    if len(ids) <= seq_len:
        pieces = [(ids, trained)]
    elif too_long == "drop":
        return [], f"too long: {len(ids)} tokens, seq_len is {seq_len}"
    elif too_long == "cut":
        pieces = [(ids[:seq_len], trained[:seq_len])]
    else:
        pieces = list(_split(ids, trained, seq_len))
    kept = [(i, t) for i, t in pieces if t[1:].any()]
    if kept:
        return kept, ""
    if len(ids) > seq_len:
        return [], f"nothing left to train on after {seq_len} tokens"
    return [], "too short: nothing to predict" if len(ids) < 2 else "nothing to train on"


def _split(ids: np.ndarray, trained: np.ndarray, seq_len: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pieces that overlap by one token, so that every token but the first is predicted exactly once."""
    for start in range(0, len(ids) - 1, seq_len - 1):
        piece = trained[start : start + seq_len].copy()
        piece[0] = piece[0] and start == 0
        yield ids[start : start + seq_len], piece
