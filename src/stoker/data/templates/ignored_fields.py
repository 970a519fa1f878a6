"""Finds the fields of a conversation that do not reach its text, by rendering it without them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.data.files.rows import Message
from stoker.data.formats.messages import REASONING, has_content
from stoker.data.templates.template_environment import TemplateRefused

Turns = list[dict[str, Any]]
Render = Callable[[Turns, Sequence[dict[str, Any]] | None], str]

# Why a row whose answer loses this field is dropped.
LOST_ANSWER = {
    "tool_calls": "the template writes no tool calls",
    "content": "the template omits the text of an answer",
    "reasoning": "the template writes no reasoning, and an answer has nothing else",
}


@dataclass(frozen=True)
class Lost:
    """The parts of a conversation that do not reach its text.

    Attributes:
        fields: (turn, field) with content that does not change the text ("tools" belongs to turn -1).
        parts: turns whose content reaches the text only in part.
    """

    fields: frozenset[tuple[int, str]]
    parts: frozenset[int]

    def reason(self, turns: Turns, trained: Collection[int]) -> str:
        """Returns why the conversation cannot be trained on: a trained answer lost its content. Empty if it can."""
        for i in sorted(trained):
            if (i, "tool_calls") in self.fields:
                return LOST_ANSWER["tool_calls"]
            if (i, "content") in self.fields:
                return LOST_ANSWER["content"]
            says_more = turns[i]["content"].strip() or turns[i].get("tool_calls")
            if not says_more and any((i, name) in self.fields for name in REASONING):
                return LOST_ANSWER["reasoning"]
        return ""


def lost_fields(
    render: Render, text: str, messages: Sequence[Message], turns: Turns, tools: Sequence[dict[str, Any]] | None
) -> Lost:
    """Compares the text of a conversation with its renderings without one of the fields.

    Args:
        render: returns the text of turns and tools; raises `TemplateRefused`.
        text: of the whole.
        messages, turns: the same, as they were read and as `chat_template.as_template_message` makes them.
    """

    def same(changed: Turns, tools: Sequence[dict[str, Any]] | None = tools) -> bool:
        try:
            return render(changed, tools) == text
        except TemplateRefused:
            return False  # the template needs the missing field

    given = _given(messages)
    lost = set()
    if (given or tools) and same([_without(turn, given) for turn in turns], None):
        lost = {(i, name) for name, places in given.items() for i in places} | ({(-1, "tools")} if tools else set())
    else:
        if tools and same(turns, None):
            lost.add((-1, "tools"))
        for name, places in given.items():
            if same([_without(turn, (name,)) for turn in turns]):
                lost |= {(i, name) for i in places}
            elif len(places) > 1:
                lost |= {(i, name) for i in places if same(_with(turns, i, _without(turns[i], (name,))))}
        lost |= {(i, "tool_calls") for i in given.get("tool_calls", ()) if _loses_a_call(turns, i, same)}
    shortened = [i for i, turn in enumerate(turns) if turn["content"].strip() not in text]
    for i in shortened:
        if same(_with(turns, i, {**turns[i], "content": f"{turns[i]['content']}\x00"})):
            lost.add((i, "content"))
    parts = {i for i in shortened if (i, "content") not in lost and turns[i]["role"] == "assistant"}
    return Lost(frozenset(lost), frozenset(parts))


def _given(messages: Sequence[Message]) -> dict[str, list[int]]:
    """Returns the non-empty fields other than role and content, with their turns."""
    found: dict[str, list[int]] = defaultdict(list)
    for i, message in enumerate(messages):
        for name, value in message.extra.items():
            if has_content(value):
                found[name].append(i)
    return found


def _without(turn: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns the turn without these fields; reasoning is removed under all its names, role and content are kept."""
    gone = {*names, *(REASONING if not set(REASONING).isdisjoint(names) else ())} - {"role", "content"}
    return {name: value for name, value in turn.items() if name not in gone}


def _with(turns: Turns, i: int, turn: dict[str, Any]) -> Turns:
    return [*turns[:i], turn, *turns[i + 1 :]]


def _loses_a_call(turns: Turns, i: int, same: Callable[[Turns], bool]) -> bool:
    """Returns whether the text stays the same without one of a turn's several calls."""
    calls = turns[i]["tool_calls"]
    if not isinstance(calls, list) or len(calls) < 2:
        return False
    fewer = ([*calls[:k], *calls[k + 1 :]] for k in range(len(calls)))
    return any(same(_with(turns, i, {**turns[i], "tool_calls": left})) for left in fewer)
