"""A tokenizer with its chat template and stop tokens, as the preparation of data needs them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from stoker.data.templates.chat_template import ChatTemplate, Rendered
from stoker.data.templates.encode import Encoder
from stoker.data.templates.render_row import separated
from stoker.data.templates.source_template import template_of
from stoker.data.templates.special_text import Inseparable, SpecialText
from stoker.data.templates.template_environment import TemplateRefused
from stoker.job.blocks.source_block import SourceBlock


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
            UserError: see `stoker.data.templates.source_template.template_of`.
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


def encode_prompt(
    codec: TextCodec,
    turns: Sequence[dict[str, Any]],
    special_tokens: Literal["text", "keep"],
    tools: Sequence[dict[str, Any]] | None = None,
    template: ChatTemplate | None = None,
    check: Callable[[str], None] | None = None,
    *,
    answered: bool = False,
) -> list[int]:
    """Returns the ids of a prompt, as in training.

    Args:
        answered: whether the turns end with the answer, and the template does not begin another one.
        tools: JSON schemas of the functions that the model may call.
        template: the chat template, if not the codec's as it is.
        check: called with the rendered text before it is encoded.

    Raises:
        TemplateRefused: when the template does not take the turns, or the special tokens in their content.
    """
    template = template or codec.template
    text = template.render(turns, tools, prompt=not answered)
    if check is not None:
        check(text)
    if special_tokens == "keep" or not codec.special_text.count([list(turns), list(tools or ())]):
        return codec.encoder.encode_one(text)
    try:
        plain = separated(template, codec.special_text, text, list(turns), tools, prompt=not answered)
    except Inseparable as error:
        raise TemplateRefused("it looks for special tokens in content") from error
    return codec.special_text.encoder.encode_one(plain)
