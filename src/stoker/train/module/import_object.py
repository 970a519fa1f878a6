"""Import of ``package.module:name`` and its calls, with an error for people where the user's code fails."""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from stoker.errors import CodeFailed, UserError, raised_in, typed_reason
from stoker.hardware.machine_limits import is_peer_gone, machine_problem
from stoker.job.load_job import LoadedJob
from stoker.resilience.stop_signals import SignalExit


def import_path(path: str, key: str, loaded: LoadedJob) -> Any:
    """Returns the callable at an import path; the current folder is searched too.

    Raises:
        UserError: nothing callable is there, or the module cannot be imported; it names the key's place in the job.
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
    except SignalExit:
        raise
    except (Exception, SystemExit) as error:
        message = f"{key}: importing {module_name} raised {typed_reason(error)}"
        raise UserError(loaded.problem(key, message)) from error
    try:
        found = functools.reduce(getattr, name.split("."), module)
    except AttributeError as error:
        near = get_close_matches(name, dir(module), 1)
        hint = f"did you mean {near[0]!r}?" if near else "write a name that the module defines"
        raise UserError(loaded.problem(key, f"{key}: {module_name} has no {name!r}", hint)) from error
    if not callable(found):
        raise UserError(loaded.problem(key, f"{key}: {path} is not callable", "give a class or a function"))
    return found


def call_import_path(path: str, key: str, loaded: LoadedJob, /, *arguments: Any, **named: Any) -> Any:
    """Returns the result of the callable at an import path.

    Raises:
        UserError: see `import_path`.
        CodeFailed: the callable raises an exception; the error names the key's place in the job.
    """
    return with_errors_at(key, loaded, path, import_path(path, key, loaded))(*arguments, **named)


def with_errors_at(key: str, loaded: LoadedJob, path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a user's function or module, whose exceptions then name the key's place in the job.

    The traceback is the error's note. Failures of the machine or of another process remain what they are, since a
    restart may avoid them.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (UserError, SignalExit, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (Exception, SystemExit) as error:
            if machine_problem(error) is not None or is_peer_gone(error):
                raise
            failed = CodeFailed(loaded.problem(key, f"{key}: {path} raised {raised_in(error)}"))
            own = error.__traceback__ and error.__traceback__.tb_next  # without this function
            failed.add_note("".join(traceback.format_exception(type(error), error, own)))
            raise failed from error

    return call
