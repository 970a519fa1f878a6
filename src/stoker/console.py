"""rich's console, on which text of other people's cannot steer the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from stoker.terminal import escape_control_characters, unescaped


class Console(rich.console.Console):
    """Colours and moves of the cursor are rich's own; what is in the text itself is shown as escapes."""

    def __init__(self, *, file: IO[str] | None = None, stderr: bool = False, **options: Any) -> None:
        own = file or unescaped(sys.stderr if stderr else sys.stdout)
        super().__init__(file=own, stderr=stderr, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See rich; each piece of text is made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_control_characters(segment.text))
