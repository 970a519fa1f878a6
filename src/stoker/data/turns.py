"""The turns of a conversation: from published spellings to `Message`, refusing what cannot be trained."""

from __future__ import annotations

import json
import math
from typing import Any

from stoker.data.record import Message, Role

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
SPEAKERS: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


class Refused(Exception):
    """This row cannot be used; the message is the reason that is counted."""


def parsed(value: Any) -> Any:
    """`value`, or what it says where it is a string that holds a JSON array or object."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def text_of(content: Any) -> str:
    """Content as text: a string, or a list of text parts, joined.

    Raises:
        Refused: it is anything else, or holds what UTF-8 cannot.
    """
    if isinstance(content, list):
        content = "".join(map(_part, content))
    if isinstance(content, float) and math.isnan(content):
        raise Refused("content is not text: NaN")
    if not isinstance(content, str):
        raise Refused(f"content is not text: {_kind(content)}")
    if not content.isascii():
        try:
            content.encode("utf-8")
        except UnicodeEncodeError:
            raise Refused("half a surrogate pair in a string") from None
    return content


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value


def role_messages(turns: Any) -> list[Message]:
    """Messages of OpenAI's form, {role, content, ...}. Empty system messages are left out.

    Raises:
        Refused: a role is unknown, a content is no text, a turn is empty where something must be said.
    """
    return _messages(turns, "role", "content", ROLES)


def from_value_messages(turns: Any) -> list[Message]:
    """Messages of ShareGPT's form, {from, value}. A function_call's JSON becomes tool_calls."""
    return _messages(turns, "from", "value", SPEAKERS)


def _messages(turns: Any, speaker: str, content: str, roles: dict[str, Role]) -> list[Message]:
    if not isinstance(turns, list):
        raise Refused(f"not a list of messages: {_kind(turns)}")
    if not turns:
        raise Refused("no messages")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise Refused(f"not a message: {_kind(turn)}")
        if speaker not in turn:
            raise Refused(f"message without {speaker}")
        name = turn[speaker]
        role = roles.get(name.strip().lower()) if isinstance(name, str) else None
        if role is None:
            raise Refused(f"unknown role: {str(name)[:40]!r}")
        extra = {k: v for k, v in turn.items() if k not in (speaker, content) and v is not None}
        value = turn.get(content)
        if name.strip().lower() == "function_call":
            extra["tool_calls"], value = _calls(value), ""
        message = Message(role, "" if value is None else text_of(value), extra)
        if _says_something(message):
            messages.append(message)
    return messages


def _says_something(message: Message) -> bool:
    """False for an empty system message; empty user and assistant turns are refused, tools may be silent."""
    if message.content.strip() or message.role == "tool":
        return True
    if message.role == "system":
        return False
    if message.role == "user":
        raise Refused("empty user turn")
    if not message.extra.get("tool_calls") and not message.extra.get("function_call"):
        raise Refused("empty answer")
    return True


def trained(messages: list[Message]) -> tuple[Message, ...]:
    """The messages up to the assistant's last.

    Raises:
        Refused: the assistant never speaks.
    """
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
    if last < 0:
        only_system = messages and all(message.role == "system" for message in messages)
        raise Refused("only a system message" if only_system else "no assistant turn")
    return tuple(messages[: last + 1])


def tools_of(value: Any) -> tuple[dict[str, Any], ...] | None:
    """The tools on offer, from a list or the JSON of one; None where there are none."""
    tools = parsed(value)
    if tools is None or tools in ("", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools is not a list of objects")
    return tuple(tools)


def _calls(value: Any) -> list[dict[str, Any]]:
    calls = parsed(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise Refused("function call is not JSON with a name")
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = f"a part of type {str(part.get('type'))[:40]!r}" if isinstance(part, dict) else _kind(part)
    raise Refused(f"content is not text: {kind}")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
