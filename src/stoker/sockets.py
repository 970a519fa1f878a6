"""Sockets of addresses of either IP version."""

from __future__ import annotations

import socket

BACKLOG = 1024  # connections that wait to be accepted


def family_of_host(host: str) -> socket.AddressFamily:
    """Returns the address family of an IP address, or of a name, which is taken for IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen(address: tuple[str, int], *, backlog: int = BACKLOG) -> socket.socket:
    """Returns a socket that listens; port 0 takes a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    return socket.create_server(address, family=family_of_host(address[0]), backlog=backlog)
