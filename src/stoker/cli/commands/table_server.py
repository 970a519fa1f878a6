"""Serve rows of embedding tables to training processes on other hosts, until the server is stopped."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from stoker.errors import CannotRun, Problem, UserError
from stoker.sockets import parse_address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker table-server``."""
    parser.add_argument(
        "--listen", required=True, metavar="HOST:PORT", help="address to bind to; port 0 chooses a free one"
    )
    parser.add_argument(
        "--secret",
        required=True,
        metavar="FILE",
        help="secret file, the same on every host, readable only by its owner: at least 32 bytes, raw or hexadecimal",
    )
    parser.add_argument(
        "--folder",
        required=True,
        metavar="DIR",
        help="folder for the snapshot and the log, from which a killed server recovers",
    )
    parser.add_argument(
        "--snapshot-every",
        type=int,
        default=1000,
        metavar="STEPS",
        help="steps between snapshots; fewer mean a shorter log and a faster restart (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT; a killed server resumes when restarted with the same folder."""
    from stoker.launch.nodes.addresses import resolved
    from stoker.runs.shared_secret import read_secret
    from stoker.sparse.servers.row_server import RowServer

    try:
        host, port = parse_address(arguments.listen, first=0)
    except ValueError as error:
        raise UserError(Problem(f"--listen {error}", "write it as 10.0.0.1:29500")) from None
    if arguments.snapshot_every < 1:
        raise UserError(
            Problem(f"--snapshot-every {arguments.snapshot_every} is not a number of steps", "write 1 or more")
        )
    address = (resolved(host), port)
    secret = read_secret(Path(arguments.secret))
    try:
        server = RowServer(address, secret, Path(arguments.folder), snapshot_every=arguments.snapshot_every)
    except OSError as error:
        raise CannotRun(f"--listen {arguments.listen}: cannot listen there: {error.strerror}") from error
    signal.signal(signal.SIGTERM, lambda *_: server.close())
    print("rows are served at {}:{}".format(*server.address), flush=True)
    server.serve()
    return 0
