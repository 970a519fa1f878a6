"""Model folders at URLs: a local folder with links into the cache, with the weights once they are needed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath

from stoker.errors import Problem, UserError
from stoker.files import replace_file
from stoker.node_cache.cache_entry import cache_errors
from stoker.node_cache.file_locks import lock_file
from stoker.node_cache.object_cache import RemoteObject, node_cache, pinned
from stoker.node_cache.object_version import ObjectVersion
from stoker.node_cache.origin import OriginStore
from stoker.node_cache.prefetch import AT_ONCE
from stoker.node_cache.urls import WEB, name_of, scheme_of, without_secrets

LISTING = ".listing.json"  # in the folder: the objects that it represents
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER = "adapter_model.safetensors"
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of an index
SETTINGS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".vocab", ".bpe")
WHOLE = (".gguf", ".model")  # a single file with one of these is a model, or a tokenizer
# A web server has no listing: these are the file names of save_pretrained.
USUAL = (
    *("config.json", "generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "new_tokens.json"),
    *(WEIGHTS, INDEX, PICKLED, PICKLED_INDEX, ADAPTER),
)


def local_path(url: str) -> Path:
    """Returns the local folder that represents a model or a tokenizer at a URL; for a GGUF file, that file.

    Weights of a folder are missing in it until `with_weights` is called. The links stay valid until this process ends.

    Raises:
        UserError: there is nothing at the URL, or it may not be read.
        RunFailed: the origin cannot be reached.
    """
    return _local_path(url, node_cache().root)


@lru_cache(maxsize=64)
def _local_path(url: str, root: Path) -> Path:
    OriginStore(url)  # it must be of a kind that can be opened
    if PurePosixPath(name_of(url)).suffix in WHOLE:
        found = node_cache().version(url)
        folder = _folder(root, {name_of(url): found})
        _link(folder, {name_of(url): found})
        return folder / name_of(url)
    files = _listed(url)
    folder = _folder(root, files)
    _link(folder, {name: found for name, found in files.items() if name.endswith(SETTINGS)})
    return folder


def is_remote(folder: Path) -> bool:
    """Returns whether a folder represents one at a URL."""
    return (folder / LISTING).is_file()


def names_in(folder: Path) -> list[str]:
    """Returns the names of the objects that such a folder represents, including weights."""
    return sorted(_objects(folder))


def with_weights(folder: Path) -> Path:
    """Downloads the weights of such a folder; returns any other folder unchanged.

    Raises:
        UserError: its index names a file that does not exist.
        RunFailed: they cannot be downloaded.
    """
    if is_remote(folder):
        objects = _objects(folder)
        _link(folder, {name: objects[name] for name in _weights(folder, objects) if name in objects})
    return folder


def _weights(folder: Path, names: Iterable[str]) -> list[str]:
    """Returns the names of the files with the model's weights; prefers safetensors."""
    adapter = [ADAPTER] if ADAPTER in names else []
    for single, index in ((WEIGHTS, INDEX), (PICKLED, PICKLED_INDEX)):
        if single in names:
            return [single, *adapter]
        if index in names:
            with suppress(OSError, *DAMAGE):  # refused when it is read
                return sorted({*json.loads((folder / index).read_bytes())["weight_map"].values(), *adapter})
    return adapter


def _listed(url: str) -> dict[str, RemoteObject]:
    """Returns the objects right below a URL, by name."""
    if scheme_of(url) in WEB:
        usual = node_cache().answer(f"model:{url}", url, lambda: list(_usual(url).values()))
        found = {each.url.rpartition("/")[2]: each for each in usual}
    else:
        top = url.rstrip("/")
        found = {each.url.removeprefix(f"{top}/"): each for each in node_cache().find(f"{top}/")}
        # Stores mark a folder by an empty object whose name ends with a slash.
        found = {name: each for name, each in found.items() if name and "/" not in name}
    if not found:
        raise UserError(
            Problem(f"there is no model in {without_secrets(url)}", "name the folder that holds its config.json")
        )
    return found


def _usual(url: str) -> dict[str, RemoteObject]:
    """Returns the objects below a web address that have usual names, and those listed in a weights index."""
    top = url.rstrip("/")
    found: dict[str, RemoteObject] = {}
    for name in USUAL:
        _add(found, top, name)
    for index in (INDEX, PICKLED_INDEX):
        if index not in found:
            continue
        path, pin = node_cache().fetch(found[index])
        with pin, suppress(*DAMAGE):  # refused when it is read
            for name in sorted(set(json.loads(path.read_bytes())["weight_map"].values())):
                if PurePosixPath(name).name == name:
                    _add(found, top, name)
    return found


def _add(found: dict[str, RemoteObject], top: str, name: str) -> None:
    try:
        found[name] = RemoteObject(f"{top}/{name}", OriginStore(top).version(f"{top}/{name}"))
        node_cache().renew(found[name])
    except UserError as error:
        if error.exit_code != UserError.exit_code or not isinstance(error.__cause__, FileNotFoundError):
            raise


def _folder(root: Path, files: dict[str, RemoteObject]) -> Path:
    """Returns the folder of this machine for some objects; the same for the same contents."""
    content = {name: {"url": without_secrets(each.url), **each.version.plain()} for name, each in sorted(files.items())}
    for name, each in files.items():
        if PurePosixPath(name).name != name or name in ("", ".", "..", LISTING):
            raise UserError(Problem(f"{without_secrets(each.url)} has a name that no file can have"))
    listing = json.dumps(content)
    folder = root / "folders" / ObjectVersion(None, listing).key("")
    with cache_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = lock_file(folder.parent / ".lock")
        assert lock is not None
        with lock:
            if not (folder / LISTING).exists():
                replace_file(folder / LISTING, listing)
    _OBJECTS[folder] = files
    return folder


def _objects(folder: Path) -> dict[str, RemoteObject]:
    if folder in _OBJECTS:
        return _OBJECTS[folder]
    content = json.loads((folder / LISTING).read_bytes())
    return {name: RemoteObject(str(each["url"]), ObjectVersion.of(each)) for name, each in content.items()}


_OBJECTS: dict[Path, dict[str, RemoteObject]] = {}  # with passwords, which are never stored in files


def _link(folder: Path, files: dict[str, RemoteObject]) -> None:
    """Fetches objects and links them into a folder, for as long as this process lives."""
    with ThreadPoolExecutor(AT_ONCE, "stoker-model") as pool:
        fetched = list(pool.map(node_cache().fetch, files.values()))
    pinned([pin for _, pin in fetched])
    for name, (data, _) in zip(files, fetched, strict=True):
        target = os.path.relpath(data, folder)
        link = folder / name
        with suppress(OSError):
            if link.readlink() == Path(target):
                continue
        fresh = folder / f".{name}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(link)
