"""Renders a row's turns as text, and finds the fields that the text leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.data.files.rows import Chat, Conversation, Message, Preference, Ranking
from stoker.data.formats.messages import WEIGHTS
from stoker.data.templates.chat_template import ChatTemplate, Rendered, answers_in, as_template_message
from stoker.data.templates.ignored_fields import lost_fields
from stoker.data.templates.special_text import Inseparable, SpecialText
from stoker.data.templates.template_environment import TemplateRefused

NOT_SEPARATED = "special tokens in its content, for which the template looks: keep them with data[].special_tokens"
TEMPLATE_REFUSES = "the chat template refuses it"


@dataclass(frozen=True)
class RenderedRow:
    """The result of rendering a row.

    Attributes:
        texts: the conversation, or one for each answer of a preference or a ranking. Empty if there is a reason.
        reason: why the row cannot be trained on.
        ignored: the fields with content that do not reach the text.
        untrained: the assistant's turns that are not trained because of their weight.
    """

    texts: tuple[Rendered, ...] = ()
    reason: str = ""
    ignored: tuple[str, ...] = ()
    untrained: int = 0


def render_example(
    template: ChatTemplate,
    example: Chat,
    train_on: str,
    special: SpecialText | None = None,
) -> RenderedRow:
    """Renders a row with its answers marked. Never raises, whatever the template does.

    Args:
        special: the special tokens, if the row's content contains some that are to be encoded as text.
    """
    outcomes = [_render(template, conversation, train_on, special) for conversation in _conversations(example)]
    reason = next((outcome.reason for outcome in outcomes if outcome.reason), "")
    return RenderedRow(
        texts=() if reason else tuple(text for outcome in outcomes for text in outcome.texts),
        reason=reason,
        ignored=tuple(dict.fromkeys(name for outcome in outcomes for name in outcome.ignored)),
        untrained=sum(turn.role == "assistant" and not turn.trained for turn in turns_of(example)),
    )


def turns_of(example: Chat) -> tuple[Message, ...]:
    """Returns all turns of a row; for a preference or a ranking, those of the prompt and of all answers."""
    if isinstance(example, Conversation):
        return example.messages
    return (*example.prompt, *(turn for answer in _answers(example) for turn in answer))


def _answers(example: Preference | Ranking) -> tuple[tuple[Message, ...], ...]:
    return (example.chosen, example.rejected) if isinstance(example, Preference) else example.answers


def _conversations(example: Chat) -> Iterator[Conversation]:
    """Yields a conversation itself, or one for each answer to a prompt, where only the answers are trained."""
    if isinstance(example, Conversation):
        yield example
        return
    prompt = tuple(replace(message, trained=False) for message in example.prompt)
    for answer in _answers(example):
        yield Conversation((*prompt, *answer), example.tools)


def _render(
    template: ChatTemplate, conversation: Conversation, train_on: str, special: SpecialText | None
) -> RenderedRow:
    messages, tools = conversation.messages, conversation.tools
    turns = [as_template_message(message) for message in messages]
    silent = {i for i, message in enumerate(messages) if not message.trained}
    answers = answers_in(turns, train_on, silent)
    if not answers:
        return RenderedRow(reason="every answer that would be trained has the weight 0")
    try:
        rendered = template.render_trained(turns, tools, train_on=train_on, silent=silent)
    except TemplateRefused as error:
        return RenderedRow(reason=f"{TEMPLATE_REFUSES}: {' '.join(str(error).split())}")
    if special is not None:
        try:
            rendered = replace(rendered, separated=separated(template, special, rendered.text, turns, tools))
        except Inseparable:
            return RenderedRow(reason=NOT_SEPARATED)
    lost = lost_fields(template.render, rendered.text, messages, turns, tools)
    read = WEIGHTS if train_on == "everything" else ()
    names = [_name(messages, i, field) for i, field in sorted(lost.fields) if field not in read]
    names += [f"{_name(messages, i, 'content')} (in part)" for i in sorted(lost.parts.intersection(answers))]
    reason = lost.reason(turns, answers)
    return RenderedRow(() if reason else (rendered,), reason, tuple(dict.fromkeys(names)))


def separated(
    template: ChatTemplate,
    special: SpecialText,
    text: str,
    turns: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    prompt: bool = False,
) -> str:
    """Returns the rendered text of turns whose special tokens are text; see `SpecialText.separate`.

    Raises:
        Inseparable: the template looks for special tokens in content itself.
    """
    try:
        return special.separate(text, template.render(special.mark(turns), special.mark(tools), prompt=prompt))
    except TemplateRefused as error:
        raise Inseparable from error


def _name(messages: tuple[Message, ...], turn: int, field: str) -> str:
    """Returns a field by the file's names: ``messages[].name``, or the column that is the turn's content."""
    if turn < 0:
        return field
    place = messages[turn].place
    return place if field == "content" and not place.endswith("[]") else f"{place}.{field}"
