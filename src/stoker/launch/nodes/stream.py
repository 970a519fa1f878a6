"""A separate connection for bulk data: the channel's frames, sent and received by a blocking thread."""

from __future__ import annotations

import json
import socket
from types import TracebackType
from typing import Any, Self

from stoker.frames import LENGTH, Greeting, PeerRefused, Seal
from stoker.launch.nodes.channel import COPIES, GREETING, Address
from stoker.sockets import close_connection

WAIT = 60.0  # seconds for the next bytes


class Stream:
    """Frames over a socket that blocks.

    Args:
        rest: bytes that have been read from it already.
    """

    def __init__(self, connection: socket.socket, seal: Seal, rest: bytes = b"") -> None:
        self._connection, self._seal, self._rest = connection, seal, rest
        connection.settimeout(WAIT)

    @classmethod
    def dial(cls, address: Address, secret: bytes, *, source: str, hello: dict[str, Any], kind: str = COPIES) -> Self:
        """Connects to a supervisor, and sends the connection's purpose.

        Raises:
            OSError: nothing listens there.
            PeerRefused: it does not have the secret.
        """
        connection = socket.create_connection(address, timeout=GREETING, source_address=(source, 0))
        try:
            greeting = Greeting(secret, dialled=True)
            while greeting.seal is None:
                connection.sendall(greeting.answer(_exactly(connection, greeting.wants)))
            stream = cls(connection, greeting.seal)
            stream.say({"kind": kind, **hello})
        except BaseException:
            connection.close()
            raise
        return stream

    def say(self, message: dict[str, Any]) -> None:
        """Sends a message."""
        self.send(json.dumps(message).encode())

    def hear(self, *, patient: bool = False) -> dict[str, Any]:
        """Returns the next frame, which is a message.

        Args:
            patient: whether it may take any time.
        """
        self._connection.settimeout(None if patient else WAIT)
        message = json.loads(self.receive())
        self._connection.settimeout(WAIT)
        if not isinstance(message, dict):
            raise PeerRefused
        return message

    def send(self, payload: bytes) -> None:
        """Sends a frame."""
        self._connection.sendall(self._seal.frame(payload))

    def receive(self) -> bytes:
        """Returns the payload of the next frame.

        Raises:
            OSError: the other side is gone.
            PeerRefused: the frame is not its next one.
        """
        head = self._read(LENGTH.size)
        return self._seal.payload(head, self._read(Seal.length(head)))

    def close(self) -> None:
        """Ends the connection; who waits for it gets an `OSError`."""
        close_connection(self._connection)

    def _read(self, size: int) -> bytes:
        kept, self._rest = self._rest[:size], self._rest[size:]
        return kept + _exactly(self._connection, size - len(kept)) if len(kept) < size else kept

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray(size)
    at = 0
    while at < size:
        got = connection.recv_into(memoryview(parts)[at:])
        if not got:
            raise ConnectionResetError("the other side has gone")
        at += got
    return bytes(parts)
