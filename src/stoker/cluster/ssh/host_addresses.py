"""The addresses at which hosts reach each other."""

from __future__ import annotations

import ipaddress
import shlex
import socket
from dataclasses import replace

from stoker.cluster.ssh.connection import Connection
from stoker.cluster.ssh.host_file import Host
from stoker.errors import Problem, RunFailed


def with_address(host: Host, connection: Connection, *, interface: str | None, alone: bool) -> Host:
    """Returns the host with the address that the others use.

    In order of precedence: the address in its line; that of ``interface``; the one that ssh uses, if the host has
    it itself; its only one.

    Args:
        alone: whether it is the only host, which needs only loopback.

    Raises:
        RunFailed: the host has no such interface, or several addresses and none of them is ssh's.
    """
    if host.address:
        return host
    if alone:
        return replace(host, address="127.0.0.1")
    if interface:
        shown = connection.run(f"ip -o -4 addr show dev {shlex.quote(interface)} || :").decode()
        words = shown.split()
        if "inet" not in words:
            hint = "write another `interface`, or `address=` behind the host"
            raise RunFailed(Problem(f"{host.name} has no address on the interface {interface}", hint))
        return replace(host, address=words[words.index("inet") + 1].partition("/")[0])
    own = connection.run("hostname -I 2>/dev/null || :").decode().split()
    name = connection.real_name()
    here = next((address for address in _resolved(name) if address in own or _is_loopback(name)), None)
    if here is not None:
        return replace(host, address=here)
    plain = [address for address in own if ":" not in address]
    if len(plain) == 1:
        return replace(host, address=plain[0])
    listed = ", ".join(plain) or "none"
    hint = "write `address=` behind the host, or `interface` for all of them"
    raise RunFailed(Problem(f"{host.name}: which of its addresses the others reach is unclear ({listed})", hint))


def _is_loopback(name: str) -> bool:
    """Returns whether a name means this machine. Another name may lead to 127.0.1.1 here, by Debian's /etc/hosts."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _resolved(name: str) -> list[str]:
    """Resolves a name to IPv4 addresses on this machine; empty if it is unknown."""
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET)))
    except OSError:
        return []
