"""A row format: its columns and its parser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.data.files.rows import Example
from stoker.data.formats.named_columns import Aliases, NamedColumns


@dataclass(frozen=True)
class Format:
    """A row format: its columns and its parser.

    Attributes:
        parse: makes an example of a row, or raises `Refused`.
        needed: the columns that identify the format.
        aliases: other names that published data sets use for a column.
    """

    parse: Callable[[NamedColumns], Example]
    needed: tuple[str, ...]
    aliases: Aliases = field(default_factory=dict)
