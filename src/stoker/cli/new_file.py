"""New files that commands write for the user to edit; an existing file is not replaced."""

from __future__ import annotations

from pathlib import Path

from stoker.errors import Problem, UserError


def write_new(name: str, text: str, *, option: str) -> None:
    """Writes a text to a new file.

    Args:
        option: the option by which the user names the file, such as ``-o FILE``.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    try:
        with Path(name).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise already_exists(name, option=option) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(Problem(f"cannot be written ({reason})", f"name another with `{option}`", file=name)) from error


def already_exists(name: str, *, option: str) -> UserError:
    """Returns the error of a file that exists."""
    hint = f"name another file with `{option}`, or remove this one"
    return UserError(Problem("the file exists already", hint, file=name))
