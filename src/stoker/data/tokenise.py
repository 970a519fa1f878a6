"""Tokenises rows and marks the trained tokens.

A row goes through four steps: its bytes are decoded, its columns parsed as a conversation or a document, the
conversation rendered by the chat template, the text encoded. Each step may refuse it with a reason.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from stoker.data import formats, template_sandbox
from stoker.data.chat_template import BUILT_IN, ChatTemplate, Rendered
from stoker.data.encode import Encoded, Encoder
from stoker.data.expected_answer import prompt_and_expected
from stoker.data.pair_formats import MOST_PAIRS
from stoker.data.readers import decode
from stoker.data.render_row import RenderedRow, render_example, separated, turns_of
from stoker.data.row_batch import EncodedBatch, EncodedBatchBuilder, Span, digest_of
from stoker.data.rows import Chat, Conversation, Example, Preference, Ranking, Raw, Rejected, Text
from stoker.data.source_template import template_of
from stoker.data.special_text import Inseparable, SpecialText
from stoker.data.template_environment import TemplateRefused
from stoker.data.trained_spans import Cut, mark_trained, spans_in_window, split_into_windows
from stoker.job.blocks.source_block import SourceBlock

JUDGED_BAD = "the label says that the answer is bad"
NO_EXPECTED = "no expected answer, with which a reward compares"


@dataclass(frozen=True)
class TextCodec:
    """The parts of a tokenizer that the data room needs; it is sent to worker processes.

    Attributes:
        definition: the content of ``tokenizer.json``.
        template: the chat template, with the special tokens it may name.
        stop_ids: tokens that end an answer when the model is served.
        end_id: the token after a document of plain text; None if the tokenizer has none.
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
        return SpecialText(self.definition, self.template)

    def encoder_of(self, rendered: Rendered) -> Encoder:
        """Returns the encoder of a rendered text."""
        return self.encoder if rendered.separated is None else self.special_text.encoder

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer itself, without truncation and padding."""
        return self.encoder.tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("encoder", "special_text")}

    def for_source(self, block: SourceBlock, base: Path) -> TextCodec:
        """Returns the codec with the chat template of a source and its arguments.

        Raises:
            UserError: see `stoker.data.source_template.template_of`.
        """
        source = template_of(block, base, own=self.template.source)
        return replace(self, template=replace(self.template, source=source))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of every setting here that affects tokens."""
        digest = hashlib.blake2b(digest_size=16)
        parts = (self.definition, self.template.source, repr(self.template.special_tokens))
        for part in (*parts, repr(sorted(self.stop_ids)), repr(self.end_id)):
            digest.update(part.encode() + b"\x00")
        return digest.hexdigest()


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
    needs_expected: bool = False  # whether a reward compares its answers with the row's expected one
    sampled: int = 0  # most tokens of an answer that the model samples after the row's prompt


@dataclass(frozen=True)
class _Pending:
    place: int  # in the chunk
    raw: Raw
    texts: tuple[Rendered, ...]  # for a preference, both answers with their prompt
    document: bool = False
    example: Chat | None = None  # not rendered yet
    special: SpecialText | None = None  # set if the content holds special tokens that are encoded as text

    @property
    def good(self) -> bool:
        """Returns False if a label marks the answer as bad."""
        return not (isinstance(self.example, Conversation) and self.example.good is False)

    @property
    def margin(self) -> float:
        """Difference in quality between a pair's chosen and rejected answer."""
        return self.example.margin if isinstance(self.example, Preference) else 0.0

    @property
    def sequences(self) -> list[tuple[int, float]]:
        """The texts that become sequences, by number, each with the margin of its pair.

        Of a ranking each pair has its better and its worse answer, as InstructGPT takes them (Ouyang et al., 2022,
        section 3.5).
        """
        if isinstance(self.example, Ranking):
            return [(number, margin) for *pair, margin in self.example.pairs for number in pair]
        return [(number, self.margin) for number in range(len(self.texts))]


def tokenise(raws: Iterable[Raw | Rejected], codec: TextCodec, settings: RowSettings) -> EncodedBatch:
    """Decodes, parses, renders and encodes a chunk of rows. Every row comes out as tokens or as a reason."""
    out, columns = EncodedBatch(), EncodedBatchBuilder()
    dropped: dict[int, Rejected] = {}
    prepared: list[_Pending] = []
    names = dict(settings.columns)
    others: dict[int, tuple[int, ...]] = {}  # numbers of joined rows, by place
    for place, raw in enumerate(raws):
        out.rows_in += 1
        item = raw if isinstance(raw, Rejected) else _prepare(place, raw, codec, settings, names, out)
        others[place] = raw.others if isinstance(raw, Raw) else ()
        out.rows_in += len(others[place])
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
        fits = [
            split_into_windows(len(ids), trained, settings.seq_len, settings.too_long, sampled=settings.sampled)
            for ids, trained, _ in texts
        ]
        out.longest = max(out.longest, *(len(ids) for ids, _, _ in texts))
        if reason := next((reason for _, reason in fits if reason), ""):
            dropped[item.place] = Rejected(item.raw.source, item.raw.row, reason)
            continue
        too_long = any(len(ids) > settings.seq_len for ids, _, _ in texts)
        out.rows_cut += too_long and settings.too_long == "cut"
        out.rows_split += too_long and settings.too_long != "cut"
        digests = _digests_of_pairs(item, [ids for ids, _, _ in texts])
        for place, (number, margin) in enumerate(item.sequences):
            (ids, trained, exact), (windows, _) = texts[number], fits[number]
            for first, last in windows:
                spans = spans_in_window(trained, first, last)
                columns.add(
                    ids[first:last],
                    spans,
                    (item.raw.source, item.raw.row),
                    stops=ids[first + spans[-1][1] - 1] in codec.stop_ids,
                    lost=len(ids) - last if settings.too_long == "cut" else 0,
                    continues=(first, last) != windows[-1],
                    exact=exact,
                    good=item.good,
                    margin=margin,
                    digest=digests[place] if digests else None,
                )
    columns.into(out)
    for place, rejected in sorted(dropped.items()):
        out.dropped += [rejected, *(replace(rejected, row=row) for row in others[place])]
    return out


def _digests_of_pairs(item: _Pending, ids: Sequence[Sequence[int]]) -> list[int]:
    """Returns digests of a ranking's sequences, two for each pair; their exclusive or is the same for all its pairs.

    So its pairs are held out together, and no prompt is on both sides. Empty for other rows.
    """
    if not isinstance(item.example, Ranking):
        return []
    of_row = digest_of(ids)
    better = [digest_of([*ids, [number]]) for number in range(len(item.example.pairs))]
    return [digest for own in better for digest in (own, own ^ of_row)]


def _prepare(
    place: int, raw: Raw, codec: TextCodec, settings: RowSettings, names: dict[str, str], out: EncodedBatch
) -> _Pending | Rejected:
    value = decode(raw)
    if isinstance(value, Rejected):
        return value
    example, ignored = formats.read(value, settings.format, names, prompts=settings.prompts)
    if isinstance(example, Conversation) and example.good is not None and not settings.keep_bad:
        ignored = [*ignored, names.get("label", "label")]  # it decides about the row but is not in the text
    if isinstance(example, Conversation) and example.after:
        ignored = [*ignored, "turns after the last answer"]
    if isinstance(example, Ranking) and example.sampled:
        ignored = [*ignored, f"pairs above {MOST_PAIRS:,} of one prompt"]
    out.ignored.update(ignored)
    special = _special(example, codec, settings, out)
    if isinstance(example, Text):
        plain = example.text if special is not None else None
        return _Pending(place, raw, (Rendered(example.text, (), exact_prefix=True, separated=plain),), document=True)
    if isinstance(example, Conversation) and example.good is False and not settings.keep_bad:
        example = JUDGED_BAD
    if settings.needs_expected and isinstance(example, Conversation) and isinstance(value, dict):
        example = example if prompt_and_expected(example, value)[1] is not None else NO_EXPECTED
    if isinstance(example, str):
        return Rejected(raw.source, raw.row, example)
    return _Pending(place, raw, (), example=example, special=special)


def _render(pending: Sequence[_Pending], codec: TextCodec, train_on: str) -> list[RenderedRow]:
    """Renders the rows' conversations and preferences."""
    rows = [(item.example, item.special) for item in pending if item.example is not None]
    if codec.template.source in BUILT_IN.values():
        return [render_example(codec.template, example, train_on, special) for example, special in rows]
    return template_sandbox.render_examples(codec.template, rows, train_on)


def _special(example: Example | str, codec: TextCodec, settings: RowSettings, out: EncodedBatch) -> SpecialText | None:
    """Counts the special tokens in a row's content; returns the encoder of special tokens as text, if that is set."""
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
    """Returns the ids of each text, the spans of its trained tokens, and whether its prompts are exact prefixes."""
    texts = [(rendered, item.document) for item in pending for rendered in item.texts]
    groups: dict[tuple[bool, bool], list[int]] = defaultdict(list)
    for i, (rendered, document) in enumerate(texts):
        groups[document, rendered.separated is None].append(i)
    found: list[tuple[list[int], list[Span], bool]] = [([], [], True)] * len(texts)
    for (document, _), members in groups.items():
        few = [texts[i][0] for i in members]
        encoder = codec.encoder_of(few[0])
        if document:
            for i, ids in zip(members, encoder.encode_documents([r.written for r in few]), strict=True):
                if codec.end_id is not None and ids[-1:] != [codec.end_id]:
                    ids.append(codec.end_id)
                found[i] = ids, [(0, len(ids))], True
            continue
        places = [[place for span in r.spans for place in span] for r in few]
        for i, r, encoded in zip(members, few, encoder.encode([r.written for r in few], places), strict=True):
            spans, whole = mark_trained(encoded, codec.stop_ids)
            found[i] = encoded[0], spans, whole and r.exact_prefix and _same_when_asked(encoded, r, codec)
    return found


def encode_prompt(
    codec: TextCodec,
    turns: Sequence[dict[str, Any]],
    special_tokens: Literal["text", "keep"],
    tools: Sequence[dict[str, Any]] | None = None,
    template: ChatTemplate | None = None,
    check: Callable[[str], None] | None = None,
) -> list[int]:
    """Returns the ids of a prompt, as in training.

    Args:
        tools: JSON schemas of the functions that the model may call.
        template: the chat template, if not the codec's as it is.
        check: called with the rendered text before it is encoded.

    Raises:
        TemplateRefused: when the template does not take the turns, or the special tokens in their content.
    """
    template = template or codec.template
    text = template.render(turns, tools, prompt=True)
    if check is not None:
        check(text)
    if special_tokens == "keep" or not codec.special_text.count([list(turns), list(tools or ())]):
        return codec.encoder.encode_one(text)
    try:
        plain = separated(template, codec.special_text, text, list(turns), tools, prompt=True)
    except Inseparable as error:
        raise TemplateRefused("it looks for special tokens in content") from error
    return codec.special_text.encoder.encode_one(plain)


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
