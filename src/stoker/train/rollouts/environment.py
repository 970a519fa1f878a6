"""Multi-turn answers: a user's function replies to each turn of the model, as a tool's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.data.formats.messages import Refused, parse_turns
from stoker.data.templates.chat_template import as_template_message
from stoker.data.templates.render_row import separated
from stoker.data.templates.special_text import Inseparable
from stoker.data.templates.template_environment import TemplateRefused
from stoker.data.text_codec import TextCodec
from stoker.errors import CodeFailed, raised_in
from stoker.resilience.stop_signals import SignalExit
from stoker.scoring.answer_rows import AnswerRow

# Placeholder for the model's turn in a rendered template, after which the reply begins.
SAID = "\N{WHITE SQUARE}said by the model\N{WHITE SQUARE}"
Turns = list[dict[str, Any]]


@dataclass(frozen=True)
class Reply:
    """Reply to a turn of the model.

    Attributes:
        turns: turns that the function returned.
        ids: their tokens, from after the stop token of the model's turn to the start of its next turn.
    """

    turns: Turns
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Environment:
    """A user's function, ``function(messages, row)``.

    It receives the conversation, the model's turn last, and all columns of the prompt's row. It returns a text (a user
    turn), a message, or a list of messages; None if the answer is complete.

    Attributes:
        name: name in the job.
        codecs: of each source of prompts, with its chat template.
        turns: most turns of the model.
    """

    name: str
    function: Callable[[Turns, dict[str, Any]], Any]
    codecs: Sequence[TextCodec]
    turns: int

    def __call__(self, turns: Turns, row: AnswerRow, source: int) -> Reply | None:
        """Returns the reply to a conversation; None if it is complete.

        Args:
            source: index of the row's source.

        Raises:
            CodeFailed: the function raises, or returns no messages; it names the row's place.
        """
        try:
            found = self.function([dict(turn) for turn in turns], dict(row.fields))
        except SignalExit:
            raise
        except (Exception, SystemExit) as error:
            raise CodeFailed(row.problem(f"{self.name} raised {raised_in(error)}")) from error
        if found is None:
            return None
        given = [{"role": "user", "content": found}] if isinstance(found, str) else found
        try:
            more = [as_template_message(m) for m in parse_turns(given if isinstance(given, list) else [given], "")]
            ids = self._ids(turns[:-1], more, self.codecs[source])
        except (Refused, TemplateRefused, Inseparable) as error:
            why = str(error) or "special tokens in it, for which the chat template looks"
            message = f"{self.name} returned what cannot follow an answer: {why}"
            raise CodeFailed(row.problem(message, "return a text, a message {role, content}, or None")) from error
        return Reply(more, tuple(ids[1:] if self.codecs[source].stop_ids.issuperset(ids[:1]) else ids))

    def _ids(self, before: Sequence[dict[str, Any]], more: Turns, codec: TextCodec) -> list[int]:
        """Returns the tokens between the model's turn and its next one, with special tokens in content encoded
        as text.
        """
        template, special = codec.template, codec.special_text
        turns = [*before, {"role": "assistant", "content": SAID}, *more]
        text = template.render(turns, None, prompt=True)
        encoder = codec.encoder
        if special.count([turn["content"] for turn in more]):
            text = separated(template, special, text, list(turns), None, prompt=True)
            encoder = special.encoder
        _, found, tail = text.rpartition(SAID)
        if not found:
            raise TemplateRefused("the chat template leaves the model's own turn out")
        return encoder.encode_one(tail)
