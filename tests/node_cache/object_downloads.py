"""Downloads through the cache, in this process and in others."""

from __future__ import annotations

import random
import subprocess
import sys

from stoker.node_cache.cache_entry import CacheEntry
from stoker.node_cache.object_cache import NodeCache, RemoteObject

MIB = 2**20


def random_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def left_part(cache: NodeCache, found: RemoteObject, content: bytes) -> CacheEntry:
    """Has the cache hold the first bytes of an object, as a download that was cut off leaves them."""
    entry = cache.entry(found)
    entry.pin().close()
    entry.note(found.url, found.version)
    entry.partial.write_bytes(content)
    return entry


def fetched(cache: NodeCache, url: str) -> bytes:
    path, pin = cache.fetch(cache.version(url))
    with pin:
        return path.read_bytes()


FETCH = """
import sys
from stoker.node_cache.object_cache import node_cache
path, pin = node_cache().fetch(node_cache().version(sys.argv[1]))
import hashlib; print(hashlib.sha256(path.read_bytes()).hexdigest())
"""


def started(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", FETCH, url], stdout=subprocess.PIPE, text=True)
