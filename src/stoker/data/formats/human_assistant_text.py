r"""A conversation in one text: turns after ``\n\nHuman:`` and ``\n\nAssistant:``, as in the preferences of HH-RLHF."""

from __future__ import annotations

import re
from typing import Any

from stoker.data.files.rows import Message
from stoker.data.formats.messages import SHAREGPT, Refused, parse_turns

_START = "\n\nHuman:"
_MARKERS = re.compile(r"\n\n(Human|Assistant):")


def is_human_assistant_text(value: Any) -> bool:
    """Returns whether a column holds such a text."""
    return isinstance(value, str) and value.startswith(_START)


def human_assistant_turns(value: Any, name: str) -> list[Message]:
    """Parses the turns of a column's text; white space around each is left out.

    Raises:
        Refused: the text does not begin with a turn of the human's, does not end with one of the assistant's, or has an
            empty turn.
    """
    if not is_human_assistant_text(value):
        raise Refused(f"{name} does not begin with \\n\\nHuman")
    _, *parts = _MARKERS.split(value)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    turns = parse_turns([{"from": speaker, "value": content.strip()} for speaker, content in pairs], name, SHAREGPT)
    if turns[-1].role != "assistant":
        raise Refused(f"{name} does not end with a turn of the assistant")
    return turns
