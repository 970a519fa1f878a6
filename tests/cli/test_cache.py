"""`stoker cache`: what is there, what may be removed, and how large it may grow."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from counting_origin import CountingOrigin

from stoker.cli.commands.cache import size_of
from stoker.cli.main import main
from stoker.cli.output.amounts import size_text
from stoker.errors import UserError
from stoker.node_cache.file_locks import lock_file
from stoker.node_cache.object_cache import NodeCache, node_cache
from stoker.node_cache.object_reader import ObjectReader

MIB = 2**20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeCache:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    return node_cache()


@pytest.fixture
def origin(cache: NodeCache) -> Iterator[CountingOrigin]:
    """Two whole objects and a part of a third one are in the cache."""
    with CountingOrigin() as served:
        served.objects = {"a/x": bytes(MIB), "a/y": bytes(2 * MIB), "b": bytes(64 * MIB)}
        for name in ("a/x", "a/y"):
            cache.fetch(cache.version(f"{served.url}/{name}"))[1].close()
        with ObjectReader(cache, cache.version(f"{served.url}/b?sig=geheim")) as reader:
            reader.read(10)
        yield served


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["cache", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_an_empty_cache(cache: NodeCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.startswith("0 objects, 0 B of ")
    assert answer(capsys)["objects"] == []


def test_the_list(origin: CountingOrigin, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys)
    objects = {each["url"]: each for each in found["objects"]}
    assert set(objects) == {f"{origin.url}/{name}" for name in origin.objects}
    whole, part = objects[f"{origin.url}/a/x"], objects[f"{origin.url}/b"]
    assert whole["whole"] and whole["bytes"] == whole["size"] == whole["origin_bytes"] == MIB
    assert not part["whole"] and 0 < part["bytes"] < part["size"] == 64 * MIB and not part["in_use"]
    assert found["bytes"] == sum(each["bytes"] for each in found["objects"])
    assert main(["cache"]) == 0
    said = capsys.readouterr().out
    assert f"{origin.url}/a/y" in said and "complete" in said and "incomplete" in said and "geheim" not in said


def test_cleaning_leaves_what_is_in_use(
    origin: CountingOrigin, cache: NodeCache, capsys: pytest.CaptureFixture[str]
) -> None:
    with ObjectReader(cache, cache.version(f"{origin.url}/a/x")) as reader:
        reader.read(1)
        assert any(each["in_use"] for each in answer(capsys)["objects"])
        assert answer(capsys, "clean", f"{origin.url}/a") == {"removed": 1, "freed": 2 * MIB, "in_use": 1}
    assert len(answer(capsys)["objects"]) == 2
    assert answer(capsys, "clean")["removed"] == 2
    assert answer(capsys)["bytes"] == 0 and not list((cache.root / "objects").iterdir())


def test_cleaning_takes_a_url_with_its_signature(origin: CountingOrigin, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "clean", origin.url[:-1])["removed"] == 0  # the beginning of another address
    assert answer(capsys, "clean", f"{origin.url}/b?sig=geheim")["removed"] == 1


def test_a_lock_is_released_though_a_child_has_its_descriptor(tmp_path: Path) -> None:
    held = lock_file(tmp_path / "lock")
    assert held is not None
    inherited = os.dup(held._descriptor)
    held.close()
    again = lock_file(tmp_path / "lock", wait=False)
    os.close(inherited)
    assert again is not None
    again.close()


def test_cleaning_says_if_nothing_matches(origin: CountingOrigin, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clean", "s3://nowhere"]) == 0
    assert capsys.readouterr().out == "no cached object is at or below s3://nowhere; `stoker cache` lists all\n"
    assert answer(capsys, "clean", "s3://nowhere") == {"removed": 0, "freed": 0, "in_use": 0}


def test_a_limit_holds_at_once_and_from_then_on(
    origin: CountingOrigin, cache: NodeCache, capsys: pytest.CaptureFixture[str]
) -> None:
    said = answer(capsys, "limit", "2.5MiB")
    assert said["limit"] == 5 * MIB // 2 and said["freed"] >= MIB
    assert answer(capsys)["limit"] == 5 * MIB // 2 and answer(capsys)["bytes"] <= 5 * MIB // 2
    assert answer(capsys, "limit", "auto")["limit"] > 5 * MIB


@pytest.mark.parametrize(
    "words",
    [
        ["limit"],
        ["limit", "much"],
        ["limit", "5XB"],
        ["limit", "9" * 400],
        ["limit", "0"],
        ["limit", "0GB"],
        ["list", "http://x"],
        ["empty"],
    ],
)
def test_wrong_words(words: list[str], cache: NodeCache, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["cache", *words]) == 2
    except SystemExit as error:  # of argparse
        assert error.code == 2
    assert "error: " in capsys.readouterr().err


def test_sizes() -> None:
    assert [size_of(word) for word in ("12", "500GB", "1.5 TiB", "2mb")] == [12, 5 * 10**11, 3 * 2**39, 2 * 10**6]
    assert [size_text(size) for size in (0, 999, 1500, 2.5e9, 3e13)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 GB",
        "30.00 TB",
    ]
    with pytest.raises(UserError, match="is not a size"):
        size_of("-1")
