"""Lists the content of the node cache, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.node_cache.cache_entry import CacheEntry
from stoker.node_cache.object_cache import NodeCache
from stoker.node_cache.urls import without_secrets


@dataclass(frozen=True)
class CachedObject:
    """An object in the cache.

    Attributes:
        url: without a signature.
        bytes: on the disk.
        size: of the whole object in bytes; None if its origin does not report it.
        whole: whether all of it is here, checked.
        in_use: whether a process reads or downloads it.
        used: when it was used last, in seconds since 1970.
        origin_bytes, peer_bytes: that came from the origin and from other nodes.
    """

    url: str
    bytes: int
    size: int | None
    whole: bool
    in_use: bool
    used: float
    origin_bytes: int
    peer_bytes: int


def cached_objects(cache: NodeCache) -> list[CachedObject]:
    """Returns all objects of a cache, most recently used first."""
    found = [_object(entry) for entry in cache.entries()]
    return sorted((each for each in found if each is not None), key=lambda each: (-each.used, each.url))


def clean(cache: NodeCache, urls: list[str]) -> tuple[int, int, int]:
    """Removes the objects of some URLs, and of those below them; without URLs all.

    Returns:
        (objects removed, bytes freed, objects that are in use and stay).
    """
    urls = [without_secrets(url) for url in urls]
    removed = freed = kept = 0
    for entry in cache.entries():
        url = str(entry.about().get("url", ""))
        if urls and not any(url == each or url.startswith(each.rstrip("/") + "/") for each in urls):
            continue
        size = entry.here()
        if entry.remove():
            removed, freed = removed + 1, freed + size
        else:
            kept += 1
    return removed, freed, kept


def _object(entry: CacheEntry) -> CachedObject | None:
    about = entry.about()
    if not about:
        return None
    size = about.get("size")
    return CachedObject(
        url=str(about.get("url", "")),
        bytes=entry.here(),
        size=int(size) if size is not None else None,
        whole=entry.is_whole,
        in_use=entry.in_use,
        used=entry.used(),
        origin_bytes=int(about.get("origin_bytes", 0)),
        peer_bytes=int(about.get("peer_bytes", 0)),
    )
