"""Folders of models at an origin: opened again without it, without passwords, by several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from counting_origin import CountingOrigin
from object_downloads import MIB, random_bytes

from stoker.errors import UserError
from stoker.node_cache import object_cache, remote_folder
from stoker.node_cache.object_cache import NodeCache
from stoker.node_cache.object_version import ObjectVersion
from stoker.node_cache.remote_folder import local_path, with_weights


def test_a_model_is_opened_again_without_its_origin(
    cache: NodeCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(object_cache, "FRESH", -1.0)
    index = b'{"weight_map": {"a": "part-1.safetensors"}}'
    files = {"config.json": b"{}", "model.safetensors.index.json": index, "part-1.safetensors": b"1"}
    with CountingOrigin({f"m/{name}": content for name, content in files.items()}) as origin:
        first = with_weights(local_path(f"{origin.url}/m"))
    remote_folder._local_path.cache_clear()  # as in another process
    again = with_weights(local_path(f"{origin.url}/m"))
    assert again == first and {name: (again / name).read_bytes() for name in files} == files
    assert capsys.readouterr().err.count("what it said before is taken") == 1


def test_the_listing_of_a_model_holds_no_password(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects |= {"m/config.json": b"{}", "m/model.safetensors": b"1", "x.gguf": b"2"}
    there = origin.url.replace("://", "://me:geheim@")
    folder = local_path(f"{there}/m")
    assert (with_weights(folder) / "model.safetensors").read_bytes() == b"1"
    assert local_path(f"{origin.url}/x.gguf?sig=geheim").read_bytes() == b"2"
    assert not any(b"geheim" in path.read_bytes() for path in cache.root.rglob("*") if path.is_file())
    assert all(each.url.startswith(there) for each in remote_folder._objects(folder).values())


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", ".listing.json"])
def test_an_object_that_would_lie_outside_of_the_folder_is_refused(name: str, cache: NodeCache) -> None:
    found = object_cache.RemoteObject("s3://b/m/x", ObjectVersion(1))
    with pytest.raises(UserError, match="s3://b/m/x has a name that no file can have"):
        remote_folder._folder(cache.root, {name: found})


def test_a_store_s_marker_of_the_folder_is_no_file(cache: NodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [object_cache.RemoteObject(f"s3://b/m/{name}", ObjectVersion(0)) for name in ("", "config.json")]
    monkeypatch.setattr(NodeCache, "find", lambda self, url: found)
    assert list(remote_folder._listed("s3://b/m")) == ["config.json"]


def test_pickled_weights_are_taken_only_without_others(tmp_path: Path) -> None:
    pickled = ["pytorch_model.bin", "adapter_model.safetensors"]
    assert remote_folder._weights(tmp_path, [*pickled, "model.safetensors"]) == ["model.safetensors", pickled[1]]
    assert remote_folder._weights(tmp_path, pickled) == pickled


OPEN_MODEL = """
import sys
from stoker.node_cache.object_version import ObjectVersion
from stoker.node_cache.origin import OriginStore
from stoker.node_cache.remote_file import RemoteFile
from stoker.node_cache.remote_folder import local_path, with_weights
print((with_weights(local_path(sys.argv[1])) / "model.safetensors").stat().st_size)
"""


@pytest.mark.slow
def test_processes_that_open_a_model_at_once_share_its_folder(origin: CountingOrigin, cache: NodeCache) -> None:
    origin.objects |= {"m/config.json": b"{}", "m/model.safetensors": random_bytes(MIB)}
    words = [sys.executable, "-c", OPEN_MODEL, f"{origin.url}/m"]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert [process.communicate(timeout=60)[0].strip() for process in processes] == [str(MIB)] * 6
    assert origin.sent == {name: len(data) for name, data in origin.objects.items()}
