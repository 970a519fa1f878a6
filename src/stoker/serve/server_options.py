"""What a server allows."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class ServerOptions:
    """Limits of a server, and who may ask it.

    Attributes:
        host: the address that is listened on.
        token: what clients have to send; None for everyone who reaches the address.
        body: most bytes of a request.
        seconds: longest time for a request.
        queue: most answers that wait or are being written.
    """

    host: str = "127.0.0.1"
    token: str | None = None
    body: int = 8 * MIB
    seconds: float = 600.0
    queue: int = 512

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        return is_loopback(self.host)

    def admits(self, authorization: str) -> bool:
        """Whether a header ``Authorization`` holds the token; takes as long for any that has its length."""
        if self.token is None:
            return True
        scheme, _, given = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode())


def is_loopback(host: str) -> bool:
    """Whether a host is of the loopback interface, by its name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "localhost.")
