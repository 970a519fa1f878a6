"""Messages with arrays over an authenticated, blocking connection. Nothing is ever unpickled."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from stoker.frames import LARGEST, LENGTH, Greeting, PeerRefused, Seal
from stoker.sockets import close_connection, end_when_unreachable

Address = tuple[str, int]
Message = dict[str, Any]
DTYPES = ("<i8", "<i4", "<f8", "<f4", "<f2", "|i1")
GREETING = 10.0  # seconds for the proof of the secret, in all
LOST = 60  # seconds of silence after which the connection ends; the host of a busy process still answers keepalives
MOST = 2**36  # bytes of the arrays of a message
MOST_ARRAYS = 1024


class ServerConnection:
    """One side of a connection: JSON messages, each followed by arrays.

    A vanished host ends it after ``LOST`` seconds; until then, its reader blocks.

    Args:
        connection: connected.
        secret: shared by both sides.
        dialled: whether this side made the connection.

    Raises:
        OSError: the other side has gone.
        PeerRefused: it does not have the secret.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, dialled: bool) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until = time.monotonic() + GREETING
        greeting = Greeting(secret, dialled=dialled)
        connection.settimeout(GREETING)
        connection.sendall(greeting.first)
        try:
            while greeting.seal is None:
                connection.sendall(greeting.answer(bytes(self._read(greeting.wants, until))))
        except ConnectionError as error:
            if not dialled or not greeting.is_challenged:  # a server that is being ended has not asked for the secret
                raise
            raise ConnectionResetError("it closed the connection; its secret may differ") from error
        self._seal: Seal = greeting.seal
        connection.settimeout(None)
        end_when_unreachable(connection, LOST)

    @classmethod
    def dial(cls, address: Address, secret: bytes) -> Self:
        """Connects to a server.

        Raises:
            OSError, PeerRefused: nothing listens there, or it does not have the secret.
        """
        connection = socket.create_connection(address, timeout=GREETING)
        try:
            return cls(connection, secret, dialled=True)
        except BaseException:
            connection.close()
            raise

    def send(self, message: Message, arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message and its arrays."""
        arrays = [np.ascontiguousarray(array) for array in arrays]
        forms = [[array.dtype.str, array.shape] for array in arrays]
        self._connection.sendall(self._seal.frame(json.dumps({**message, "arrays": forms}).encode()))
        for array in arrays:
            data = array.reshape(-1).view(np.uint8).data
            for at in range(0, len(data), LARGEST):
                self._connection.sendall(self._seal.frame(bytes(data[at : at + LARGEST])))

    def receive(self) -> tuple[Message, list[np.ndarray]]:
        """Returns the next message and its arrays.

        Raises:
            OSError: the other side has gone.
            PeerRefused: the received data is not one of its messages.
        """
        try:
            message = json.loads(self._frame())
            forms = message.pop("arrays")
            sizes = [math.prod(map(_whole, shape)) * np.dtype(dtype).itemsize for dtype, shape in forms]
            known = all(dtype in DTYPES for dtype, _ in forms)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PeerRefused from error
        if not known or len(forms) > MOST_ARRAYS or sum(sizes) > MOST:
            raise PeerRefused
        return message, [self._array(dtype, shape, size) for (dtype, shape), size in zip(forms, sizes, strict=True)]

    def close(self) -> None:
        """Ends the connection; who waits for it gets an `OSError`."""
        close_connection(self._connection)

    def _array(self, dtype: str, shape: list[int], size: int) -> np.ndarray:
        data, at = bytearray(size), 0
        while at < size:
            part = self._frame()
            if not part or at + len(part) > size:
                raise PeerRefused
            data[at : at + len(part)] = part
            at += len(part)
        return np.frombuffer(data, dtype).reshape(shape)

    def _frame(self) -> bytes:
        head = bytes(self._read(LENGTH.size))
        return self._seal.payload(head, bytes(self._read(Seal.length(head))))

    def _read(self, size: int, until: float | None = None) -> bytearray:
        """Returns the next bytes.

        Args:
            until: when they must have come, by the monotonic clock; None for no limit.
        """
        data, at = bytearray(size), 0
        view = memoryview(data)
        while at < size:
            if until is not None:
                self._connection.settimeout(max(0.001, until - time.monotonic()))
            count = self._connection.recv_into(view[at:])
            if not count:
                raise ConnectionResetError("the other side has gone")
            at += count
        return data


def _whole(size: object) -> int:
    if not isinstance(size, int) or size < 0:
        raise ValueError
    return size
