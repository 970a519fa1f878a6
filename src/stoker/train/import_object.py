"""Import of ``package.module:name``, with an error for people when it does not exist."""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.job.load_job import LoadedJob


def import_path(path: str, key: str, loaded: LoadedJob) -> Any:
    """Returns the callable at an import path; the current folder is searched too.

    Raises:
        UserError: nothing callable is there; it names the key's place in the job.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not name:
        raise UserError(loaded.problem(key, f"{key}: {path!r} is not an import path", "write package.module:name"))
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            loaded.problem(key, f"{key}: there is no module {error.name!r}", "is it in this folder?")
        ) from error
    try:
        found = reduce(getattr, name.split("."), module)
    except AttributeError as error:
        near = get_close_matches(name, dir(module), 1)
        hint = f"did you mean {near[0]!r}?" if near else "write a name that the module defines"
        raise UserError(loaded.problem(key, f"{key}: {module_name} has no {name!r}", hint)) from error
    if not callable(found):
        raise UserError(loaded.problem(key, f"{key}: {path} is not callable", "give a class or a function"))
    return found
