"""Addresses of supervisors: parsing, name resolution, and the network interface that has one."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

from stoker.errors import CannotRun, Problem, UserError
from stoker.launch.nodes.channel import Address
from stoker.sockets import LAST_PORT, family_of_host, parse_address


def parsed(text: str) -> list[Address]:
    """Parses ``HOST:PORT[,HOST:PORT ...]``; each host becomes the address at which the others reach it.

    Raises:
        UserError: it is not written so.
        CannotRun: a host has no address.
    """
    found: list[Address] = []
    hidden: set[Address] = set()
    for part in text.split(","):
        try:
            host, port = parse_address(part.strip())
        except ValueError as error:
            raise UserError(Problem(f"--rendezvous {error}", "write it as 10.0.0.1:29400")) from None
        address = (resolved(host), port)
        if address in found:
            raise UserError(Problem(f"--rendezvous names {part} twice", "name each node once"))
        found.append(address)
        if _is_hidden(host, address[0]):
            hidden.add(address)
    other = next((address for address in found if not is_loopback(address[0])), None)
    if other is None or not hidden:
        return found
    own = address_towards(other)
    return [(own, address[1]) if address in hidden else address for address in found]


def all_addresses(host: str) -> list[str]:
    """Resolves the addresses of a host, IPv4 first.

    Raises:
        CannotRun: it has none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CannotRun(
            Problem(f"the host {host} has no address ({error})", "write the address itself, or add it to /etc/hosts")
        ) from error
    return list(
        dict.fromkeys(str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET))
    )


def resolved(host: str) -> str:
    """Resolves the address of a host; prefers IPv4.

    Raises:
        CannotRun: it has none.
    """
    return all_addresses(host)[0]


def own_address(rendezvous: Sequence[Address], listen: str | None) -> Address:
    """Returns the address to listen at: ``listen``, or without it this node's entry in the rendezvous.

    A node that has neither takes the address from which it reaches the first entry. Port 0 takes a free one.

    Raises:
        CannotRun: this machine does not have the address.
    """
    if listen is not None:
        host, _, port = listen.rpartition(":") if listen.count(":") == 1 else (listen, "", "")
        if port and not (port.isdecimal() and int(port) <= LAST_PORT):
            message = f"--listen {listen}: {port} is not a port; a port is from 0 to {LAST_PORT}"
            raise UserError(Problem(message, "write it as 10.0.0.1:29400"))
        address = resolved(host)
        others = [entry for entry in rendezvous if not is_own(entry[0])]
        if _is_hidden(host, address) and others:
            address = address_towards(others[0])
        if not is_own(address):
            raise CannotRun(Problem(f"--listen {listen}: this machine has no such address", _own_addresses()))
        if port:
            return address, int(port)
        return next((entry for entry in rendezvous if entry[0] == address), (address, 0))
    if found := [entry for entry in rendezvous if is_own(entry[0])]:
        return found[0]
    return address_towards(rendezvous[0]), 0


def address_towards(other: Address) -> str:
    """Returns the address of this machine from which it reaches another. Nothing is sent.

    Raises:
        CannotRun: there is no way to it.
    """
    with socket.socket(family_of_host(other[0]), socket.SOCK_DGRAM) as towards:
        try:
            towards.connect(other)
        except OSError as error:
            raise CannotRun(
                Problem(f"there is no way to {other[0]} from here ({error.strerror})", "name this node's --listen")
            ) from error
        return str(towards.getsockname()[0])


def is_own(host: str) -> bool:
    """Returns whether this machine has an address."""
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        return False
    with socket.socket(family_of_host(host), socket.SOCK_STREAM) as trial:
        try:
            trial.bind((host, 0))
        except OSError:
            return False
    return True


def _is_hidden(host: str, address: str) -> bool:
    """Returns whether a name leads to loopback: this node's does so on itself by Debian's /etc/hosts (127.0.1.1)."""
    return is_loopback(address) and address != host


def is_loopback(host: str) -> bool:
    """Returns whether an address leads to the machine that uses it."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def interface_of(host: str) -> str:
    """Returns the name of the interface that has an address.

    Raises:
        CannotRun: none has it.
    """
    wanted = ipaddress.ip_address(host.partition("%")[0])
    loopback = ""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            found = ipaddress.ip_address(entry.address.partition("%")[0])
            if found == wanted:
                return name
            loopback = name if found.is_loopback else loopback
    if wanted.is_loopback and loopback:
        return loopback  # it has all of 127.0.0.0/8
    raise CannotRun(Problem(f"no network interface of this machine has the address {host}", _own_addresses()))


def host_and_port(address: Address) -> str:
    """Returns ``HOST:PORT``."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _own_addresses() -> str:
    own = [e.address for entries in psutil.net_if_addrs().values() for e in entries if e.family == socket.AF_INET]
    return f"it has {', '.join(own)}"
