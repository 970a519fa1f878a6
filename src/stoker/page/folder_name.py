"""Names of folders from texts of users; `static/folder_name.js` computes the same in the browser."""

from __future__ import annotations

import re

from stoker.page.page_error import bad_request

OTHER = re.compile(r"(?:[^\w.-]|\.{2,})+")
LONGEST = 80  # characters


def folder_name(text: str) -> str:
    """Converts a text to the name of a folder: letters and digits of any script, ``_``, ``-`` and single dots.

    Raises:
        PageError: it has no valid characters.
    """
    found = OTHER.sub("-", text).lstrip("-.")[:LONGEST].rstrip("-.")
    if not found:
        raise bad_request("`{name}` cannot be the name of a folder", "use letters and digits", name=text[:40])
    return found
