"""Downloads through the cache, in this process and in others."""

from __future__ import annotations

import random
import subprocess
import sys

from stoker.node_cache.object_cache import NodeCache

MIB = 2**20


def random_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


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
