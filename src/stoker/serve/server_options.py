"""Limits and access of a server."""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import re
from dataclasses import dataclass

from stoker.serve.named_keys import ADMIN, KeyFile, NamedKey
from stoker.units import MIB

_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::\d*)?")


@dataclass(frozen=True)
class ServerOptions:
    """Limits of a server, and its access control.

    Attributes:
        token: token that clients must send; None allows everyone, unless there are keys.
        keys: named keys that are accepted beside the token.
        body: most bytes of a request body.
        seconds: timeout of a request.
        queue: most answers that are queued or running.
    """

    token: str | None = None
    keys: KeyFile | None = None
    body: int = 8 * MIB
    seconds: float = 600.0
    queue: int = 512

    @property
    def open(self) -> bool:
        """Whether requests need no token."""
        return self.token is None and self.keys is None

    def caller(self, authorization: str) -> NamedKey | None:
        """Returns the key of an ``Authorization`` header; None for an unknown one. The token's owner has no name.

        Raises:
            UserError: the file of keys is wrong.
        """
        if self.open:
            return OWNER
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        if self.token is not None and hmac.compare_digest(given.strip().encode(), self.token.encode()):
            return OWNER
        return None if self.keys is None else self.keys.find(given.strip())


def options_of(arguments: argparse.Namespace, token: str | None) -> ServerOptions:
    """Returns the options of a command line."""
    return ServerOptions(
        token=token,
        keys=None if arguments.keys is None else KeyFile(arguments.keys.resolve()),
        body=int(arguments.max_body * MIB),
        seconds=arguments.timeout,
        queue=arguments.queue,
    )


OWNER = NamedKey("", ADMIN, "")


def host_of(header: str) -> str:
    """Returns the host of a header ``Host``, without its port; empty if the header is malformed."""
    found = _HOST.fullmatch(header)
    return found[1] if found else ""


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address belongs to the loopback interface."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "localhost.")
