"""Start the web page: start, watch and compare runs in a browser. See docs/page.md and docs/page-api.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from stoker.cli.options.server_address import add_tls, check_access, check_address
from stoker.cli.options.token_file import read_token
from stoker.errors import Problem, UserError
from stoker.resilience.stop_signals import stop_is_success

PACKAGES = ("anyio", "starlette", "uvicorn", "prometheus_client", "httpx2")
PORT = 7860


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker ui``."""
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"port; 0 chooses a free one (default: {PORT})"
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--token", type=Path, metavar="FILE", help="file with the login token")
    parser.add_argument(
        "--users", type=Path, metavar="FILE", help="file with the name, role and token SHA-256 of one user per line"
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        action="extend",
        type=Path,
        metavar="DIR",
        help="folders of runs; new runs are created in the first one (default: runs)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        action="extend",
        type=Path,
        default=[],
        metavar="DIR",
        help="additional folders that jobs may read",
    )
    parser.add_argument(
        "--urls",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="URL prefixes of stores that jobs may use, such as s3://bucket/folder or redis://host:6379/0",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="folder for uploads, queue and log (default: ~/.local/state/stoker/page)",
    )
    add_tls(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM; started runs continue."""
    with stop_is_success():
        return _serve(arguments)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    _check(arguments)
    token = read_token(arguments.token, "--token") if arguments.token is not None else None
    try:
        from stoker.page.start_page import start_page
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in PACKAGES:
            raise
        raise UserError(Problem(f"the page needs {error.name}", "pip install 'stoker[ui]'")) from error
    return start_page(arguments, token)


def _check(arguments: argparse.Namespace) -> None:
    """Rejects wrong options.

    Raises:
        UserError: an option is wrong.
    """
    check_address(arguments)
    if arguments.token is not None and arguments.users is not None:
        raise UserError(Problem("give --token or --users, not both", "each user of --users has a token"))
    _check_places(arguments)
    has_token = arguments.token is not None or arguments.users is not None
    check_access(arguments, has_token=has_token, hint="add --token FILE or --users FILE")


def _check_places(arguments: argparse.Namespace) -> None:
    """Checks ``--runs``, ``--data`` and ``--urls``.

    Raises:
        UserError: a folder or a URL cannot be used.
    """
    from stoker.page.access.listed_urls import listing_problem

    for folder in (*(arguments.runs or ()), *arguments.data):
        if folder.exists() and not folder.is_dir():
            raise UserError(Problem(f"{folder} is not a folder", "name a folder"))
    for folder in arguments.runs or ():
        if not folder.absolute().parent.is_dir():
            hint = "is it misspelt? A folder for new runs is created in an existing one"
            raise UserError(Problem(f"--runs: there is no folder {folder.parent}", hint))
    for folder in arguments.data:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}")
    for url in arguments.urls:
        if problem := listing_problem(url):
            raise UserError(Problem(f"--urls: {problem}", "write it as s3://bucket/folder or redis://host:6379/0"))
