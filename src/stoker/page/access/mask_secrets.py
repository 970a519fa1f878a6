"""Masks passwords and signatures of URLs in texts."""

from __future__ import annotations

import os
import re
from typing import Any, BinaryIO

from stoker.json_values import map_leaves
from stoker.node_cache.masked_urls import mask_urls

_LINE_END = re.compile(rb"[\r\n]")


def mask_secrets(value: Any) -> Any:
    """Replaces passwords, users of web addresses, and values of signed queries in texts by ``***``."""
    return map_leaves(value, lambda leaf: mask_urls(leaf) if isinstance(leaf, str) else leaf)


def masked_part(file: BinaryIO, offset: int, most: int) -> tuple[str, int]:
    """Returns lines of a log from a byte offset on, masked, and the offset of the next part.

    A secret that is split in two would not be recognised. So a part that begins within a line starts at the next one,
    and an incomplete last line is left for the next part.

    Args:
        offset: where to begin; below 0 it counts from the end of the log.
        most: bytes of the part; a longer line is left out.
    """
    size = file.seek(0, os.SEEK_END)
    begin = max(0, size + offset) if offset < 0 else min(offset, size)
    file.seek(max(0, begin - 1))
    content = file.read(most + 1) if begin else b"\n" + file.read(most)  # with the preceding byte, which may end a line
    end = begin + len(content) - 1
    first = _LINE_END.search(content)
    if first is None:
        return "", end
    content = content[first.end() :]
    last = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1
    if last or len(content) < most:
        end -= len(content) - last
    return mask_secrets(content[:last].decode("utf-8", "replace")), end
