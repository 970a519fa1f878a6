"""Frames of the channel: a mutual challenge-response, then payloads that each carry a message authentication code.

Who accepted the connection sends 32 random bytes. Who dialled answers with 32 of its own and an HMAC-SHA256 over both,
under the secret; only when that is right does the other prove that it has the secret, too. Both derive a key for each
direction from the secret and the two challenges. A frame is its length (4 bytes), its payload, and an HMAC over a
counter, the length and the payload, so that frames cannot be changed, repeated, left out or sent back.

A payload is authenticated, not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import struct

SECRET = CHALLENGE = MAC = 32  # bytes
LENGTH = struct.Struct(">I")
COUNT = struct.Struct(">Q")
LARGEST = 16 * 2**20  # bytes of a payload
SMALL = 64 * 1024  # bytes of a payload that is copied rather than hashed in two parts


class PeerRefused(Exception):
    """The other side does not have the secret, or a frame is not from it."""


def new_secret() -> bytes:
    """Generates a secret for the processes of one run."""
    return secrets.token_bytes(SECRET)


class Greeting:
    """The challenge-response of one connection, without its transport.

    Args:
        dialled: whether this side made the connection.
    """

    def __init__(self, secret: bytes, *, dialled: bool) -> None:
        self._secret, self._dialled = secret, dialled
        self._mine = secrets.token_bytes(CHALLENGE)
        self._theirs = b""
        self.seal: Seal | None = None

    @property
    def first(self) -> bytes:
        """Bytes to send before anything is received."""
        return b"" if self._dialled else self._mine

    @property
    def is_challenged(self) -> bool:
        """Returns whether the other side's challenge has been received."""
        return bool(self._theirs)

    @property
    def wants(self) -> int:
        """Bytes of the next part."""
        return CHALLENGE if self._dialled else CHALLENGE + MAC

    def answer(self, part: bytes) -> bytes:
        """Processes a part of `wants` bytes; returns the bytes to send. At the end of the handshake it sets ``seal``.

        Raises:
            PeerRefused: the other side does not have the secret.
        """
        if self._dialled and not self._theirs:
            self._theirs = part
            return self._mine + self._proof("dialled")
        theirs, proof = (self._theirs, part) if self._dialled else (part[:CHALLENGE], part[CHALLENGE:])
        self._theirs = theirs
        if not hmac.compare_digest(proof, self._proof("accepted" if self._dialled else "dialled")):
            raise PeerRefused
        keys = [derived(self._secret, "stoker frames 1", way, *self._challenges) for way in ("dialled", "accepted")]
        mine, other = keys if self._dialled else reversed(keys)
        self.seal = Seal(mine, other)
        return b"" if self._dialled else self._proof("accepted")

    @property
    def _challenges(self) -> tuple[bytes, bytes]:
        """The challenges of the accepting and of the dialling side."""
        return (self._theirs, self._mine) if self._dialled else (self._mine, self._theirs)

    def _proof(self, who: str) -> bytes:
        return derived(self._secret, "stoker channel 1", who, *self._challenges)


class Seal:
    """Makes the frames of one side of a connection, and reads those of the other."""

    def __init__(self, mine: bytes, theirs: bytes) -> None:
        self._mine, self._theirs = mine, theirs
        self._sent = self._read = 0

    def frame(self, payload: bytes) -> bytes:
        """Returns the next frame to be sent."""
        if len(payload) > LARGEST:
            raise ValueError(f"a frame of {len(payload)} bytes")
        head = LENGTH.pack(len(payload))
        code = _code(self._mine, self._sent, head, payload)
        self._sent += 1
        return b"".join((head, payload, code))

    @staticmethod
    def length(head: bytes) -> int:
        """Bytes that follow the head of a frame.

        Raises:
            PeerRefused: more than a frame may have.
        """
        (length,) = LENGTH.unpack(head)
        if length > LARGEST:
            raise PeerRefused
        return int(length) + MAC

    def payload(self, head: bytes, rest: bytes) -> bytes:
        """Returns the payload of the next frame that was received.

        Raises:
            PeerRefused: the frame is not the next one of the other side.
        """
        payload, code = rest[:-MAC], rest[-MAC:]
        if not hmac.compare_digest(code, _code(self._theirs, self._read, head, payload)):
            raise PeerRefused
        self._read += 1
        return payload


def _code(key: bytes, number: int, head: bytes, payload: bytes) -> bytes:
    if len(payload) <= SMALL:  # one call takes a third of the time, which a leader of a thousand nodes has for each
        return hmac.digest(key, b"".join((COUNT.pack(number), head, payload)), "sha256")
    code = hmac.new(key, COUNT.pack(number) + head, "sha256")
    code.update(payload)
    return code.digest()


def derived(secret: bytes, *labels: str | int | bytes) -> bytes:
    """Returns a key for one purpose (HMAC-SHA256 over the labels, each behind its length)."""
    parts = [label if isinstance(label, bytes) else str(label).encode() for label in labels]
    return hmac.digest(secret, b"".join(len(part).to_bytes(4) + part for part in parts), "sha256")
