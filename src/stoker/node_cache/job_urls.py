"""The URLs in a job: those that its processes may request, themselves or through another node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from fsspec.utils import glob_translate

from stoker.job.keys.key_paths import leaves
from stoker.node_cache.urls import MAGIC, RANGE, WEB, expand_braces, has_magic, is_url, number_in_range, scheme_of

_PARTS = re.compile(r"[/\\?#;]")


def urls_of(job: Any) -> list[str]:
    """Returns all values of a job that are URLs of a store."""
    values = [value for _, leaf in leaves(job) for value in (leaf if isinstance(leaf, list) else [leaf])]
    return [value for value in values if isinstance(value, str) and is_url(value)]


def is_named(url: str, named: Sequence[str]) -> bool:
    """Returns whether a URL is one of a job's, is below one, or matches a range or a pattern of it."""
    return not _leads_elsewhere(url) and any(_covers(each, url) for each in named)


def _leads_elsewhere(url: str) -> bool:
    """Returns whether a URL may lead to another place than it seems to, however often it is unquoted."""
    while (plain := unquote(url)) != url:
        url = plain
    return ".." in _PARTS.split(url) or any(character < " " for character in url)


def _covers(named: str, url: str) -> bool:
    if url == named or url.startswith(named.rstrip("/") + "/"):
        return True
    pattern, query = _without_query(named)
    place, _, path = pattern.partition("://")[2].partition("/")
    if MAGIC.search(place) or RANGE.search(place):  # any host might fit
        return False
    asked, asked_query = _without_query(url)
    if not (RANGE.search(path) or has_magic(pattern)) or asked_query not in (query, ""):
        return False
    if has_magic(pattern):
        return any(re.match(glob_translate(each), asked) for each in expand_braces(pattern))
    return _in_range(pattern.rstrip("/"), asked)


def _in_range(pattern: str, url: str) -> bool:
    """Returns whether a URL matches a pattern with ranges, or is below a match."""
    texts, bounds = RANGE.split(pattern)[::3], RANGE.findall(pattern)
    match = re.fullmatch(r"(\d+)".join(map(re.escape, texts)) + "(?:/.*)?", url)
    return match is not None and all(
        int(first) <= int(number) <= int(last) and number == number_in_range(int(number), first, last)
        for number, (first, last) in zip(match.groups(), bounds, strict=True)
    )


def _without_query(url: str) -> tuple[str, str]:
    address, _, query = url.partition("?") if scheme_of(url) in WEB else (url, "", "")
    return address, query
