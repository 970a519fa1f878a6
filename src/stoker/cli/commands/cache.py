"""List, clean or limit this node's cache of data and models downloaded from URLs."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.output.amounts import ago, size_text
from stoker.cli.output.text_table import print_table
from stoker.errors import Problem, UserError

if TYPE_CHECKING:
    from stoker.node_cache.cache_listing import CachedObject
    from stoker.node_cache.object_cache import NodeCache

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([A-Za-z]*)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker cache``."""
    parser.add_argument(
        "what",
        nargs="?",
        default="list",
        choices=("list", "clean", "limit"),
        help="list: list the cached objects; clean: remove unused objects; limit: set the maximum size",
    )
    parser.add_argument(
        "values",
        nargs="*",
        metavar="URL | SIZE",
        help="clean: only these URLs and everything below them; limit: 500GB, or auto for half of the disk",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the cache, or the result of a change."""
    from stoker.node_cache.cache_listing import clean
    from stoker.node_cache.object_cache import node_cache

    cache = node_cache()
    if arguments.what == "list":
        if arguments.values:
            raise UserError(Problem("`stoker cache list` takes no URL", "write `stoker cache clean URL`, or `--json`"))
        return _list(cache, as_json=arguments.json)
    if arguments.what == "limit":
        if len(arguments.values) != 1:
            raise UserError(Problem("`stoker cache limit` takes one size", "write 500GB, or auto"))
        word = arguments.values[0]
        limit = None if word == "auto" else size_of(word)
        if limit == 0:
            message = f"a limit of {word} leaves no room for any object"
            raise UserError(Problem(message, "write `stoker cache clean` to empty the cache, or a size such as 500GB"))
        cache.set_limit(limit)
        answer: dict[str, Any] = {"limit": cache.limit, "freed": cache.shrink(cache.limit)}
        text = f"cache limit: {size_text(answer['limit'])}; {size_text(answer['freed'])} freed"
    else:
        removed, freed, kept = clean(cache, arguments.values)
        answer = {"removed": removed, "freed": freed, "in_use": kept}
        text = f"{removed} objects removed, {size_text(freed)} freed"
        text += f"; {kept} in use, not removed" if kept else ""
        if arguments.values and not removed and not kept:
            text = f"no cached object is at or below {', '.join(arguments.values)}; `stoker cache` lists all"
    print(json.dumps(answer) if arguments.json else text)
    return 0


def _list(cache: NodeCache, *, as_json: bool) -> int:
    from stoker.hardware.cache_folder import cache_folder
    from stoker.node_cache.cache_listing import cached_objects

    objects = cached_objects(cache)
    tokens = sum(map(_bytes_of, (cache_folder() / "tokens").rglob("*")))
    size = sum(each.bytes for each in objects)
    answer = {
        "folder": str(cache.root),
        "bytes": size,
        "limit": cache.limit,
        "free": shutil.disk_usage(cache.root).free,
        "token_caches_bytes": tokens,
    }
    if as_json:
        print(json.dumps({**answer, "objects": [asdict(each) for each in objects]}, indent=2))
        return 0
    if objects:
        _print_table(objects)
    print(f"{len(objects)} objects, {size_text(size)} of {size_text(cache.limit)} in {cache.root}")
    if tokens:
        print(f"token caches (no limit): {size_text(tokens)} in {cache_folder() / 'tokens'}")
    return 0


def _bytes_of(path: Path) -> int:
    """Returns the size of a file; 0 for a folder, and for a file that was renamed meanwhile."""
    with suppress(FileNotFoundError):
        return path.stat().st_size if path.is_file() else 0
    return 0


def _print_table(objects: list[CachedObject]) -> None:
    rows = (
        (each.url, size_text(each.size or each.bytes), _state(each), ago(time.time() - each.used)) for each in objects
    )
    print_table(("object", ">size", "state", ">last used"), rows)


def _state(each: CachedObject) -> str:
    if each.whole:
        return "in use" if each.in_use else "complete"
    share = f"{each.bytes / each.size:.0%}" if each.size else size_text(each.bytes)
    return f"{share}, {'downloading' if each.in_use else 'incomplete'}"


def size_of(word: str) -> int:
    """Parses ``500GB``, ``1.5 TiB`` or a plain number to bytes.

    Raises:
        UserError: it is not a size.
    """
    match = _SIZE.fullmatch(word.strip())
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise UserError(Problem(f"{word} is not a size", "write a size such as 500GB or 1.5TiB, or auto"))
    return int(float(match[1]) * unit)
