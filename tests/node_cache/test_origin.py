"""Queries of an origin that does not answer."""

from __future__ import annotations

import logging

import pytest

from stoker.errors import RunFailed
from stoker.node_cache import origin
from stoker.node_cache.origin import TRIES, OriginStore


@pytest.mark.parametrize(("patience", "attempts"), [(30.0, TRIES), (-1.0, 1)])
def test_a_query_is_repeated_for_a_limited_time(
    patience: float, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "WAIT", 0)
    monkeypatch.setattr(origin, "PATIENCE", patience)
    asked = []

    def fails() -> None:
        asked.append(1)
        raise OSError("no route")

    with pytest.raises(RunFailed, match=r"memory://x cannot be reached: .*no route"):
        OriginStore("memory://x")._asked("memory://x", fails)
    assert len(asked) == attempts


def test_the_library_of_a_store_logs_no_tracebacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gcsfs")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    origin._file_system.cache_clear()
    OriginStore("gs://bucket/object")
    logging.getLogger("gcsfs").error("out of retries")
    assert "out of retries" not in caplog.text
