"""The URLs that a job names: what its processes may ask for, themselves or through another node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.job.key_paths import leaves
from stoker.node_cache.urls import MAGIC, has_magic, is_url


def urls_of(job: Any) -> list[str]:
    """All values of a job that are URLs of a store."""
    values = [value for _, leaf in leaves(job) for value in (leaf if isinstance(leaf, list) else [leaf])]
    return [value for value in values if isinstance(value, str) and is_url(value)]


def is_named(url: str, named: Sequence[str]) -> bool:
    """Whether a URL is one of a job's, lies below one, or may fit a pattern of it."""
    return ".." not in url.split("/") and any(_covers(each, url) for each in named)


def _covers(named: str, url: str) -> bool:
    if url == named or url.startswith(named.rstrip("/") + "/"):
        return True
    start = named.partition("{")[0]
    if has_magic(named):
        start = start[: match.start()] if (match := MAGIC.search(start)) else start
    return start != named and "/" in start.partition("://")[2] and url.startswith(start)
