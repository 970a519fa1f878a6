"""URLs of Redis servers without their secrets, and what may be shown of a URL that cannot be parsed."""

from __future__ import annotations

import re

REDIS = ("redis", "rediss", "unix")
SHOWN = ("prefix", "db")  # parameters of a Redis URL without secrets; others may be `password`


def without_secret_parameters(url: str) -> str:
    """Returns the URL of a Redis server with only those parameters that have no secrets; other URLs as they are."""
    address, mark, query = url.partition("?")
    if not mark or url.partition("://")[0].lower() not in REDIS:
        return url
    kept = "&".join(part for part in query.split("&") if part.partition("=")[0] in SHOWN)
    return f"{address}?{kept}" if kept else address


def shown_part(url: str) -> str:
    """Returns what may be shown of a malformed URL: neither its query nor what precedes an ``@``."""
    scheme, mark, rest = re.split("[?#]", url, maxsplit=1)[0].partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"
