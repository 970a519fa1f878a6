"""The columns of a row under our names; errors use the file's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stoker.data.files.rows import Message, Role
from stoker.data.formats.messages import (
    OPENAI,
    Refused,
    TurnForm,
    has_content,
    messages_in,
    parse_turns,
    parsed,
    text_of,
)

Aliases = Mapping[str, tuple[str, ...]]
"""Other names that published data sets use for a column."""


def column_of(row: Mapping[str, Any], aliases: Aliases, columns: Mapping[str, str], ours: str) -> str:
    """Returns the file's name of one of our columns; our name if the row has neither it nor an alias."""
    if ours in columns:
        return columns[ours]
    if ours in row:
        return ours
    return next((name for name in aliases.get(ours, ()) if name in row), ours)


class NamedColumns:
    """Reads the columns of a row; remembers which were read.

    Attributes:
        value: the row as it is in the file.
        columns: the job's `{our name: the file's name}`.
        prompts: whether the model answers the rows itself.
    """

    def __init__(
        self, value: dict[str, Any], aliases: Aliases, columns: Mapping[str, str], *, prompts: bool = False
    ) -> None:
        self.value, self.columns, self.prompts = value, columns, prompts
        self._aliases = aliases
        self._read: dict[str, str] = {}  # our name: the file's

    def ignored(self) -> list[str]:
        """Returns the columns with content that have not been read; none of prompts, as rewards receive all of them."""
        if self.prompts:
            return []
        read = set(self._read.values())
        return [name for name, value in self.value.items() if name not in read and has_content(value)]

    def taken(self) -> dict[str, str]:
        """Returns the columns with content that have been read, ``{our name: the file's name}``."""
        return {ours: theirs for ours, theirs in self._read.items() if has_content(self.value.get(theirs))}

    def read_as(self, aliases: Aliases) -> None:
        """Has further columns found by the other names of another format."""
        self._aliases = aliases

    def name(self, ours: str) -> str:
        """Returns the file's name of our column, which counts as read."""
        name = column_of(self.value, self._aliases, self.columns, ours)
        self._read[ours] = name
        return name

    def get(self, ours: str) -> Any:
        """Returns the value; None if it is missing (a missing number counts as such)."""
        value = self.value.get(self.name(ours))
        return None if isinstance(value, float) and math.isnan(value) else value

    def need(self, ours: str) -> Any:
        name = self.name(ours)
        if name not in self.value:
            raise Refused(f"missing column: {name}")
        if isinstance(self.value[name], float) and self.get(ours) is None:
            raise Refused(f"NaN in column {name}")
        return self.value[name]

    def text(self, ours: str) -> str:
        """Returns an optional column's text, "" if it is missing."""
        value = self.get(ours)
        return "" if value is None else text_of(value)

    def turns(self, ours: str, role: Role) -> list[Message]:
        """Parses the column to messages: one message, a list of them, or text as one turn of ``role``."""
        return self.turns_in(self.need(ours), ours, role)

    def turns_in(self, value: Any, ours: str, role: Role) -> list[Message]:
        """Returns a value of a column as messages; see `turns`."""
        turns = parsed(value)
        # An answer may itself be JSON: in text, only a list whose every item has a role counts as messages.
        if isinstance(value, str) and not isinstance(turns, list):
            return self.turn(value, ours, role)
        found = messages_in(turns, f"{self.name(ours)}[]", may_lack_answer=self.prompts)
        if found == []:  # only empty system messages
            raise Refused(f"empty {self.name(ours)}")
        return self.turn(value, ours, role) if found is None else found

    def turn(self, content: Any, ours: str, role: Role) -> list[Message]:
        """Returns a value of a column as one turn."""
        return parse_turns([{"role": role, "content": content}], self.name(ours), may_lack_answer=self.prompts)

    def listed_turns(self, ours: str, form: TurnForm = OPENAI) -> list[Message]:
        """Parses the column's list of messages."""
        value = parsed(self.need(ours))
        return parse_turns(value, f"{self.name(ours)}[]", form, may_lack_answer=self.prompts)

    def system(self) -> list[Message]:
        """Returns the system column as a message, unless it is empty."""
        text = self.text("system")
        return [Message("system", text, place=self.name("system"))] if text.strip() else []

    def tools(self) -> tuple[dict[str, Any], ...] | None:
        """Returns the tools column, a list of objects or its JSON; None if it is empty."""
        tools = parsed(self.get("tools"))
        if tools is None or tools in ("", []):
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise Refused("tools is not a list of objects")
        return tuple(tools)
