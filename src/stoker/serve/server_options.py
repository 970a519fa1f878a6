"""What a server allows."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass

from stoker.serve.named_keys import ADMIN, KeyFile, NamedKey

MIB = 1 << 20


@dataclass(frozen=True)
class ServerOptions:
    """Limits of a server, and who may ask it.

    Attributes:
        host: the address that is listened on.
        token: what clients have to send; None for everyone who reaches the address, unless there are keys.
        keys: the named keys that are admitted beside the token.
        body: most bytes of a request.
        seconds: longest time for a request.
        queue: most answers that wait or are being written.
    """

    host: str = "127.0.0.1"
    token: str | None = None
    keys: KeyFile | None = None
    body: int = 8 * MIB
    seconds: float = 600.0
    queue: int = 512

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        return is_loopback(self.host)

    @property
    def open(self) -> bool:
        """Whether everyone who reaches the address may ask."""
        return self.token is None and self.keys is None

    def caller(self, authorization: str) -> NamedKey | None:
        """Whose key a header ``Authorization`` holds; None for nobody's. The token's owner has no name.

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


OWNER = NamedKey("", ADMIN, "")


def is_loopback(host: str) -> bool:
    """Whether a host is of the loopback interface, by its name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "localhost.")
