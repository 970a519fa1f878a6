"""Names of files and folders from texts of users; `static/folder_name.js` computes those of folders in the browser."""

from __future__ import annotations

import re

from stoker.page.page_error import bad_request

LONGEST = 200  # bytes; file systems take 255, and names of versions, copies and removed runs are longer
NOT_IN_FOLDERS = re.compile(r"(?:[^\w.-]|\.{2,})+")
FOLDERS = re.compile(r"[/\\]")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def folder_name(text: str) -> str:
    """Converts a text to the name of a folder: letters and digits of any script, ``_``, ``-`` and single dots.

    Raises:
        PageError: it has no valid characters.
    """
    found = cut(NOT_IN_FOLDERS.sub("-", text).lstrip("-."), LONGEST).rstrip("-.")
    if not found:
        raise bad_request("`{name}` cannot be the name of a folder", "use letters and digits", name=text[:40])
    return found


def file_name(text: str) -> str:
    """Returns the name of a file without folders and control characters, and not hidden; it may be empty."""
    return CONTROL.sub("_", FOLDERS.split(text)[-1]).lstrip(".-_ ")


def cut(text: str, most: int) -> str:
    """Returns the beginning of a text, at most ``most`` bytes of UTF-8."""
    return text.encode()[:most].decode("utf-8", "ignore")
