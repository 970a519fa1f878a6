"""Sockets of addresses of either IP version."""

from __future__ import annotations

import socket
from contextlib import suppress

BACKLOG = 1024  # connections that wait to be accepted
LAST_PORT = 65535


def parse_address(text: str, *, first: int = 1) -> tuple[str, int]:
    """Parses HOST:PORT; the host of ``[::1]:29500`` comes without its brackets.

    Args:
        first: the lowest port.

    Raises:
        ValueError: the text has another form, or the port is out of range.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{text}: this is not a HOST:PORT")
    if len(port) > len(str(LAST_PORT)) or not first <= int(port) <= LAST_PORT:
        raise ValueError(f"{text}: {port} is not a port; a port is from {first} to {LAST_PORT}")
    return host.strip("[]"), int(port)


def family_of_host(host: str) -> socket.AddressFamily:
    """Returns the address family of an IP address, or of a name, which is taken for IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def end_when_unreachable(connection: socket.socket, seconds: int) -> None:
    """Has the kernel end a connection whose other host is silent for ``seconds``, a multiple of 4; 0 takes that back.

    The host of a busy or stopped process answers, unless it takes no more bytes. macOS asks idle connections only.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1 if seconds else 0)
    probes = {
        "TCP_KEEPIDLE": seconds // 4,
        "TCP_KEEPALIVE": seconds // 4,
        "TCP_KEEPINTVL": seconds // 4,
        "TCP_KEEPCNT": 3,
    }
    options = {**(probes if seconds else {}), "TCP_USER_TIMEOUT": 1000 * seconds}
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def close_connection(connection: socket.socket) -> None:
    """Closes a connection; a thread that waits for it gets an `OSError`."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def listen(address: tuple[str, int], *, backlog: int = BACKLOG) -> socket.socket:
    """Returns a socket that listens; port 0 takes a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    return socket.create_server(address, family=family_of_host(address[0]), backlog=backlog)
