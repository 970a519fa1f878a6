"""List, add and remove the API keys of `stoker serve --keys` and the users of `stoker ui --users`."""

from __future__ import annotations

import argparse
from pathlib import Path

from stoker.errors import UserError

ROLES = ("ask", "see", "run", "admin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker keys``."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="file with the name, role and SHA-256 of one key per line"
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--add", metavar="NAME", help="create a key and print it once; the file holds only its hash")
    one.add_argument("--change", metavar="NAME", help="change the role of a key to --role")
    one.add_argument("--remove", metavar="NAME", help="remove a key; it is refused from the next request on")
    parser.add_argument(
        "--role",
        choices=ROLES,
        help="for stoker serve: ask (default) or admin; for stoker ui: see, run or admin",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the keys, or the new key."""
    from stoker.serve.named_keys import ASK, add_key, change_role, read_keys, remove_key

    path = arguments.file
    if arguments.add is not None:
        print(add_key(path, arguments.add, arguments.role or ASK, ROLES))
    elif arguments.change is not None:
        if arguments.role is None:
            raise UserError("--change needs the new role: --role ROLE")
        change_role(path, arguments.change, arguments.role, ROLES)
    elif arguments.remove is not None:
        remove_key(path, arguments.remove, ROLES)
    else:
        for key in read_keys(path, ROLES, option="file"):
            print(f"{key.name:20} {key.role:6} {key.hash[:12]}...")
    return 0
