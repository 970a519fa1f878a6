"""An origin that counts what it sends, and a cache of the test's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from counting_origin import CountingOrigin

from stoker.node_cache import origin as origins
from stoker.node_cache.object_cache import NodeCache, node_cache


@pytest.fixture
def origin() -> Iterator[CountingOrigin]:
    with CountingOrigin() as served:
        yield served


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeCache:
    """This process' cache, empty."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    return node_cache()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions are asked again at once."""
    monkeypatch.setattr(origins, "WAIT", 0.0)
    monkeypatch.setattr(sys.modules["stoker.node_cache.download"], "WAIT", 0.0)
