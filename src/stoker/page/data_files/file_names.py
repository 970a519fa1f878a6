"""Names of files and folders from texts of users; `static/folder_name.js` computes those of folders in the browser."""

from __future__ import annotations

import re

from stoker.page.page_error import bad_request

LONGEST = 200  # bytes; file systems take 255, and names of versions, copies and removed runs are longer
NOT_IN_FOLDERS = re.compile(r"(?:[^\w.-]|\.{2,})+")
FOLDERS = re.compile(r"[/\\]")
# Control characters, and those that set the direction of text, by which a name is shown as another one.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]+")


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
    """Returns the name of a file without folders and characters that are not shown, and not hidden; it may be empty."""
    return CONTROL.sub("_", FOLDERS.split(text)[-1]).lstrip(".-_ ")


def shortened(name: str, ending: str) -> str:
    """Returns the name of a file of at most `LONGEST` bytes: a long one is cut before its ending."""
    return cut(name.removesuffix(ending), LONGEST - len(ending.encode())) + ending


def cut(text: str, most: int) -> str:
    """Returns the beginning of a text, at most ``most`` bytes of UTF-8."""
    return text.encode()[:most].decode("utf-8", "ignore")
