"""Starts the page's server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.page.access.accounts import read_users
from stoker.page.app import application, page_of
from stoker.page.page_settings import PageSettings, state_folder
from stoker.page.processes.chat_servers import clean_up
from stoker.serve.server import Tls, listening_socket, serve

ENDING = 2.0  # seconds for pending answers, when the server is asked to end


def start_page(arguments: argparse.Namespace, token: str | None) -> int:
    """Answers until SIGTERM.

    Raises:
        UserError: the address is taken, a folder cannot be made, or the file of users is wrong.
    """
    if arguments.users is not None:
        read_users(arguments.users)
    base = Path.cwd()
    runs = tuple(folder.resolve() for folder in arguments.runs or [base / "runs"])
    for folder in runs:
        if folder.is_dir():
            continue
        try:
            folder.mkdir(exist_ok=True)
            print(f"note: the folder {folder} is new", file=sys.stderr)
        except OSError as error:
            raise UserError(
                Problem(f"{folder} cannot be made: {error.strerror}", "name another: --runs DIR")
            ) from error
    bound = listening_socket(arguments.host, arguments.port)
    tls = Tls(arguments.tls_key, arguments.tls_certificate) if arguments.tls_key else None
    settings = PageSettings(
        host=arguments.host,
        port=bound.getsockname()[1],
        runs=runs,
        data=tuple(folder.resolve() for folder in arguments.data),
        state=state_folder(arguments.state),
        base=base,
        token=token,
        users=arguments.users.resolve() if arguments.users is not None else None,
        secure=tls is not None,
        urls=tuple(arguments.urls),
    )
    clean_up(settings.state)
    page = page_of(settings)
    if any(process.state == "waiting" for _, process in page.queue.entries()):
        page.queue.start_starter()
    serve(application(page), bound, tls=tls, seconds=ENDING, drain=lambda: None)
    return 0
