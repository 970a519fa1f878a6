"""Write a job file from a recipe: every key of the schema with its type, default and meaning beside it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.job.recipes import DEFAULT_RECIPE, recipe_description, recipe_names, write_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``stoker new``."""
    parser.add_argument(
        "recipe",
        nargs="?",
        default=DEFAULT_RECIPE,
        metavar="RECIPE",
        help=f"one of --list; {DEFAULT_RECIPE} by default",
    )
    parser.add_argument("-o", "--output", default="job.yaml", metavar="FILE", help="the file to write; - for stdout")
    parser.add_argument("--list", action="store_true", help="list the recipes")


def run(arguments: argparse.Namespace) -> int:
    """Write the recipe. Raises UserError for an unknown recipe and for a file that exists."""
    if arguments.list:
        for name in recipe_names():
            print(f"{name}\n  {recipe_description(name)}")
        return 0
    text = write_recipe(arguments.recipe)
    if arguments.output == "-":
        sys.stdout.write(text)
        return 0
    path = Path(arguments.output)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        hint = "name another file with `-o FILE`, or remove this one"
        raise UserError(Problem("the file exists already", hint, file=str(path))) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            Problem(f"cannot be written ({reason})", "name another with `-o FILE`", file=str(path))
        ) from error
    print(f"{path} written; next: stoker check {path}")
    return 0
