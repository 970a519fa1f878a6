"""Parses the turns of a conversation into `Message`, refusing what cannot be trained."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.data.files.rows import Message, Role
from stoker.json_values import kind_of_json


@dataclass(frozen=True)
class TurnForm:
    """How a turn is written: the keys of its speaker and of its content, and the role of each speaker."""

    speaker: str
    content: str
    roles: Mapping[str, Role]


_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
OPENAI = TurnForm("role", "content", {**_ROLES, "developer": "system", "function": "tool"})
SHAREGPT = TurnForm(
    "from",
    "value",
    {**_ROLES, "human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"},
)
WEIGHTS = ("weight", "loss_weight")  # fields of a turn: with 0 it is not trained
REASONING = ("reasoning_content", "thinking", "reasoning")  # synonyms; the first is the standard
TEXTS = frozenset({"text", "input_text", "output_text"})  # types of content parts
CALLS = frozenset({"tool_call", "tool_calls"})
NOT_TEXT = {"image": "a picture", "video": "a film", "audio": "sound"}  # by a substring of the part's type


class Refused(Exception):
    """This row cannot be used; the message is the reason that is counted."""


def parsed(value: Any) -> Any:
    """Returns `value`, or the parsed content if it is a string with a JSON array or object."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def has_content(value: Any) -> bool:
    """Returns whether a field is non-empty: null, NaN, blank text and empty lists are empty."""
    if isinstance(value, str):
        return bool(value) and not value.isspace()
    return value is not None and value not in ([], {}) and not (isinstance(value, float) and math.isnan(value))


def text_of(content: Any) -> str:
    """Converts content to text: a string, or a number or a boolean as JSON writes it.

    Raises:
        Refused: it is another type, or cannot be encoded as UTF-8.
    """
    if isinstance(content, float) and not math.isfinite(content):
        raise Refused(f"content is not text: {json.dumps(content)}")
    if isinstance(content, bool | int | float):
        return json.dumps(content)
    if not isinstance(content, str):
        raise Refused(f"content is not text: {kind_of_json(content)}")
    if not content.isascii():
        try:
            content.encode("utf-8")
        except UnicodeEncodeError:
            raise Refused("half a surrogate pair in a string") from None
    return content


def content_of(content: Any) -> tuple[str, dict[str, Any]]:
    """Returns the text of a turn's content, and its other parts as ``reasoning_content`` and ``tool_calls``.

    Parts are ``{"type": "text", "text": ...}``, or with the text under ``value``; likewise of the types
    reasoning, thinking and tool_call.

    Raises:
        Refused: a part is a picture, a film, sound, or of another unknown type.
    """
    if not isinstance(content, list):
        return "" if content is None else text_of(content), {}
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in content:
        if not isinstance(part, dict):
            raise Refused(f"content is not text: a list with {kind_of_json(part)} in it")
        kind = str(part.get("type", "text"))
        value = next((part[name] for name in ("text", "value", kind) if part.get(name) is not None), None)
        if kind in CALLS and value is not None:
            calls += _calls(value)
        elif isinstance(value, str) and kind in TEXTS:
            texts.append(text_of(value))
        elif isinstance(value, str) and kind in REASONING:
            reasoning.append(text_of(value))
        else:
            what = next((f"{name} cannot be trained" for word, name in NOT_TEXT.items() if word in kind), "")
            raise Refused(f"{what or 'content is not text'}: a part of type {kind[:40]!r}")
    extra: dict[str, Any] = {REASONING[0]: "\n".join(reasoning)} if reasoning else {}
    return "".join(texts), extra | ({"tool_calls": calls} if calls else {})


def messages_in(value: Any, place: str, *, may_lack_answer: bool = False) -> list[Message] | None:
    """Parses a message or a list of messages, in OpenAI's or ShareGPT's form; None if it is neither.

    Raises:
        Refused: as `parse_turns` does.
    """
    turns = value if isinstance(value, list) else [value]
    if turns and all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return parse_turns(turns, place, may_lack_answer=may_lack_answer)
    if turns and all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in turns):
        return parse_turns(turns, place, SHAREGPT, may_lack_answer=may_lack_answer)
    return None


def parse_turns(turns: Any, place: str, form: TurnForm = OPENAI, *, may_lack_answer: bool = False) -> list[Message]:
    """Parses a list of messages. Empty system messages are left out.

    Args:
        place: their column, for the audit.
        may_lack_answer: whether an empty last answer is left out instead of refused.

    Raises:
        Refused: a role is unknown, a content is not text, or a turn that needs content is empty.
    """
    if not isinstance(turns, list):
        raise Refused(f"not a list of messages: {kind_of_json(turns)}")
    if not turns:
        raise Refused("no messages")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise Refused(f"not a message: {kind_of_json(turn)}")
        if form.speaker not in turn:
            raise Refused(f"message without {form.speaker}")
        name = turn[form.speaker]
        role = form.roles.get(name.strip().lower()) if isinstance(name, str) else None
        if role is None:
            raise Refused(f"unknown role: {str(name)[:40]!r}")
        extra = {k: v for k, v in turn.items() if k not in (form.speaker, form.content) and v is not None}
        value = turn.get(form.content)
        if name.strip().lower() == "function_call":
            extra["tool_calls"], value = _calls(value), ""  # as ShareGPT writes calls
        if isinstance(extra.get("function_call"), dict):  # as OpenAI wrote a call before there were several
            extra["tool_calls"] = _calls(extra.pop("function_call"))
        trained = _weight(extra, role)
        text, parts = content_of(value)
        if twice := next((name for name in parts if extra.get(name)), ""):
            raise Refused(f"a turn has {twice} beside its content and in it")
        message = Message(role, text, extra | parts, trained, place)
        if _says_something(message, may_be_empty=may_lack_answer and number == len(turns)):
            messages.append(message)
    return messages


def _says_something(message: Message, *, may_be_empty: bool) -> bool:
    """False for an empty system message; empty user and assistant turns are refused, tools may be silent.

    Args:
        may_be_empty: whether an empty assistant's turn is left out too.
    """
    if message.content.strip() or message.role == "tool":
        return True
    if message.role == "system":
        return False
    if message.role == "user":
        raise Refused("empty user turn")
    if any(message.extra.get(name) for name in ("tool_calls", *REASONING)):
        return True
    if not may_be_empty:
        raise Refused("empty answer")
    return False


def _weight(extra: dict[str, Any], role: Role) -> bool:
    """Returns whether a turn is trained, and removes its weight from `extra`. Non-zero weights of other roles than the
    assistant's stay there: they have no effect.
    """
    trained = True
    for name in WEIGHTS:
        value = extra.get(name)
        if isinstance(value, bool | int | float) and value == 0:
            trained = False
            del extra[name]
        elif role == "assistant" and value is not None:
            if not isinstance(value, bool | int | float) or value != 1:
                raise Refused(f"a turn's {name} is neither 0 nor 1: {str(value)[:40]}")
            del extra[name]
    return trained


def until_last_answer(messages: list[Message], *, may_lack_answer: bool = False) -> tuple[Message, ...]:
    """Returns the messages up to the assistant's last.

    Args:
        may_lack_answer: whether an empty answer is added to turns that end with another's turn.

    Raises:
        Refused: the assistant never speaks, or only in turns whose weight is 0.
    """
    only_system = all(message.role == "system" for message in messages)
    if may_lack_answer and not only_system and messages[-1].role != "assistant":
        messages = [*messages, Message("assistant", "")]
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if not answers:
        raise Refused("only a system message" if messages and only_system else "no assistant turn")
    if not any(messages[i].trained for i in answers):
        raise Refused("every answer has the weight 0")
    return tuple(messages[: answers[-1] + 1])


def _calls(value: Any) -> list[dict[str, Any]]:
    calls = parsed(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise Refused("function call is not JSON with a name")
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]
