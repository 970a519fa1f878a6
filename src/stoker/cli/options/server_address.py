"""Options of the commands that serve HTTP: the address, and TLS."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.sockets import LAST_PORT


def add_tls(parser: argparse.ArgumentParser) -> None:
    """Adds ``--tls-key`` and ``--tls-certificate``."""
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="private key, in PEM")
    parser.add_argument("--tls-certificate", type=Path, metavar="FILE", help="certificate chain, in PEM")


def check_address(arguments: argparse.Namespace) -> None:
    """Checks ``--port`` and the files of TLS.

    Raises:
        UserError: the port or a file is wrong.
    """
    if not 0 <= arguments.port <= LAST_PORT:
        raise UserError(f"--port is a number from 0 to {LAST_PORT}")
    if (arguments.tls_key is None) != (arguments.tls_certificate is None):
        raise UserError("--tls-key and --tls-certificate go together")
    for file in (arguments.tls_key, arguments.tls_certificate):
        if file is not None and not file.is_file():
            raise UserError(f"there is no file {file}")


def check_access(arguments: argparse.Namespace, *, has_token: bool, hint: str, warn: bool = True) -> None:
    """Checks that a server has a token if other machines can reach it.

    Args:
        hint: the options that give a token.
        warn: whether to warn of a token that is sent without TLS.

    Raises:
        UserError: other machines can reach the address, and there is no token.
    """
    from stoker.serve.server_options import is_loopback

    if is_loopback(arguments.host):
        return
    if not has_token:
        what = f"--host {arguments.host} can be reached from other machines, so a token is needed"
        raise UserError(Problem(what, hint))
    if warn and arguments.tls_key is None:
        print("without --tls-key and --tls-certificate the token can be read on its way", file=sys.stderr)
