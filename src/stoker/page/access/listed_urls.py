"""The remote stores and servers that a job may name: URLs below one that the page was started with.

No request is sent: a URL is compared part by part, so that no spelling leads to another host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

from stoker.job.conflicts.all_conflicts import STORES
from stoker.node_cache.urls import LOCAL, URL, WEB, WRAPPERS, scheme_of, without_secrets

REDIS = ("redis", "rediss")
AZURE = ("abfs", "abfss")  # container@account
PLACE = re.compile(r"[A-Za-z0-9._~:\[\]-]*")  # a host with its port, or a bucket
BREAKS = re.compile(r"[/\\{},]")  # between the parts of a path, ranges and alternatives included
OPTIONS = re.compile(r"(prefix=[\w.:-]*)?")  # of Redis; others are those of a client, which may name files
ODD = re.compile(r"[\\\x00-\x20\x7f]")  # characters that libraries parse differently


def is_remote(text: str) -> bool:
    """Returns whether a string of a job is the address of a remote store or server."""
    return bool(URL.match(text)) and scheme_of(text) not in (*LOCAL, "lmdb")


def is_listed(text: str, urls: Sequence[str]) -> bool:
    """Returns whether a URL is one of some, or below one of them."""
    if not is_remote(text) or (found := _parts(text)) is None:
        return False
    return any(_is_below(found, known) for url in urls if (known := _parts(url)) is not None)


def listing_problem(url: str) -> str:
    """Returns why a URL cannot be allowed for a page's jobs; empty if it can."""
    if not is_remote(url):
        return f"{url[:80]} is not a URL of a store"
    found = _parts(url)
    if scheme_of(url) in WRAPPERS or "::" in url:
        return f"{without_secrets(url)} leads to another URL, or has an IPv6 address, which is not compared"
    if found is None or "?" in url or "#" in url or not any(found[1:]) or (scheme_of(url) in WEB and not found[1]):
        return f"{without_secrets(url)} names no place: write scheme://host/path without a user and without options"
    return ""


def _is_below(found: tuple[str, str, str], known: tuple[str, str, str]) -> bool:
    if known[0] in STORES and known[2]:  # the path is a database or a socket, with nothing below it
        return found == known
    return found[:2] == known[:2] and (f"{found[2]}/").startswith(f"{known[2]}/" if known[2] else "")


def _parts(url: str) -> tuple[str, str, str] | None:
    """Returns scheme, host and path of a URL; None if libraries could parse it differently."""
    if ODD.search(url) or "::" in url:
        return None
    scheme = scheme_of(url)
    place, _, path = url.partition("://")[2].partition("/")
    user, at, host = place.rpartition("@")
    in_azure = scheme in AZURE and bool(user) and PLACE.fullmatch(user) is not None
    if not PLACE.fullmatch(host) or re.search(r"[@?#]", user):
        return None
    if at and not in_azure and scheme not in (*STORES, *WEB):
        return None
    if scheme in WEB:
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    elif scheme in STORES:
        path, _, options = path.partition("?")
        if "#" in path or not OPTIONS.fullmatch(options) or (scheme in REDIS and not re.fullmatch(r"[0-9]*", path)):
            return None
    if ".." in BREAKS.split(unquote(unquote(path))):
        return None
    return scheme, (place if in_azure else host).lower(), path.rstrip("/")
