"""Connections between supervisors: JSON messages in frames over TCP, without blocking and in one thread."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stoker import sockets
from stoker.frames import LENGTH, Greeting, PeerRefused, Seal

Address = tuple[str, int]
Message = dict[str, Any]
GREETING = 5.0  # timeout in seconds to connect and to authenticate
STRANGERS = 256  # maximum of unauthenticated connections; the oldest is closed first
AT_ONCE = 256 * 1024  # bytes that are read from one connection before the others
UNREACHABLE = 12  # seconds without an answer of the other host; a supervisor may be silent for longer (`SignsOfLife`)
COPIES, CACHE = "copies", "cache"  # the kinds of message after which a connection carries other frames
BACKLOG = 64 * 2**20  # bytes waiting to be sent; a peer that exceeds it is dropped


@dataclass(frozen=True)
class Up:
    """The connection is made, and both sides have the secret."""

    peer: Peer


@dataclass(frozen=True)
class Down:
    """The connection has ended, or was never made.

    Attributes:
        refused: whether the other side closed it when it was to prove that it has the secret.
    """

    peer: Peer
    refused: bool = False


@dataclass(frozen=True)
class Said:
    """A message has come."""

    peer: Peer
    message: Message


Happening = Up | Down | Said


class Peer:
    """One connection.

    Attributes:
        address: the address that was dialled; of an accepted connection, its remote address.
        name: a label for the connection's user.
    """

    def __init__(
        self, connection: socket.socket, address: Address, secret: bytes, *, dialled: bool, unsent: set[Peer]
    ) -> None:
        self.connection, self.address, self.dialled = connection, address, dialled
        self._unsent = unsent
        self.name = ""
        self.mask = 0
        self.began = time.monotonic()
        self.is_up = self.is_over = False
        self.hands_over = False  # whether later bytes are for the new owner of the connection
        self._greeting = Greeting(secret, dialled=dialled)
        self._proved = False
        self.seal: Seal | None = None
        self.incoming, self.outgoing = bytearray(), bytearray(self._greeting.first)

    def send(self, message: Message) -> None:
        """Queues a message, in order; does nothing once the connection is closed."""
        self.send_text(text_of(message))

    def send_text(self, text: bytes) -> None:
        """Queues a message encoded by `text_of`, so that a broadcast to a thousand nodes is encoded once."""
        if self.seal is not None and not self.is_over:
            self.outgoing += self.seal.frame(text)
            self._unsent.add(self)

    def take(self) -> Iterator[Happening]:
        """Parses the received bytes to events.

        Raises:
            PeerRefused: they are not those of a peer.
        """
        while self.seal is None:
            wants = self._greeting.wants
            if len(self.incoming) < wants:
                return
            part = bytes(self.incoming[:wants])
            del self.incoming[:wants]
            self.outgoing += self._greeting.answer(part)
            self._unsent.add(self)
            self._proved = True
            self.seal = self._greeting.seal
            if self.seal is not None:
                self.is_up = True
                yield Up(self)
        at = 0
        try:
            while len(self.incoming) - at >= LENGTH.size:
                head = bytes(self.incoming[at : at + LENGTH.size])
                end = at + LENGTH.size + Seal.length(head)
                if len(self.incoming) < end or self.hands_over:
                    return
                rest = bytes(self.incoming[at + LENGTH.size : end])
                at = end
                message = json.loads(self.seal.payload(head, rest).decode())
                if not isinstance(message, dict):
                    raise PeerRefused
                self.hands_over = message.get("kind") in (COPIES, CACHE)
                yield Said(self, message)
        except ValueError as error:
            raise PeerRefused from error
        finally:
            del self.incoming[:at]

    def down(self) -> Down:
        """Returns the event of the connection's end."""
        return Down(self, refused=self.dialled and self._proved and not self.is_up)


def text_of(message: Message) -> bytes:
    """Encodes a message."""
    return json.dumps(message, separators=(",", ":")).encode()


class PeerNetwork:
    """All connections of a supervisor, and its listening socket.

    Args:
        listen: address to bind to; port 0 takes a free one.
        strangers: maximum number of unauthenticated connections; the oldest is closed first.

    Attributes:
        address: the bound address.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        listen: Address,
        secret: bytes,
        *,
        strangers: int = STRANGERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret, self._most, self._clock = secret, strangers, clock
        self._listening = sockets.listen(listen)
        self._listening.setblocking(False)
        self.address: Address = self._listening.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._strangers: dict[Peer, None] = {}  # in order of arrival
        self._peers: set[Peer] = set()
        self._unsent: set[Peer] = set()
        self._over: list[Happening] = []
        self._cut_until = 0.0

    def dial(self, address: Address) -> Peer:
        """Starts a connection; `poll` reports whether it is established or failed."""
        connection = socket.socket(sockets.family_of_host(address[0]), socket.SOCK_STREAM)
        connection.setblocking(False)
        peer = Peer(connection, address, self._secret, dialled=True, unsent=self._unsent)
        try:
            if self.is_cut:
                raise ConnectionRefusedError
            connection.bind((self.address[0], 0))  # the others see the address that this node is known by
            connection.connect(address)
        except BlockingIOError:
            pass
        except OSError:
            self._end(peer)
            return peer
        self._add(peer, selectors.EVENT_WRITE)
        return peer

    def poll(self, seconds: float) -> list[Happening]:
        """Returns the events since the last call, after at most ``seconds`` of waiting."""
        found, self._over = self._over, []
        self._write_all()
        for key, mask in self._selector.select(0.0 if found or self._over else seconds):
            if key.fileobj is self._listening:
                self._accept()
                continue
            peer: Peer = key.data
            if mask & selectors.EVENT_READ and not peer.is_over:
                found += self._read(peer)
            if mask & selectors.EVENT_WRITE and not peer.is_over:
                self._write(peer)
        self._write_all()
        now = self._clock()
        for peer in [peer for peer in self._strangers if now - peer.began > GREETING]:
            self._end(peer)
        found += self._over
        self._over = []
        return found

    def close_peer(self, peer: Peer) -> None:
        """Closes a connection, after sending as much as possible without blocking; `poll` reports its end."""
        if not peer.is_over:
            self._write(peer)
            self._end(peer)

    def detach(self, peer: Peer) -> tuple[socket.socket, Seal, bytes]:
        """Detaches a connection: returns its socket, its keys, and the bytes already received."""
        assert peer.seal is not None
        self._forget(peer)
        peer.is_over = True
        peer.connection.setblocking(True)
        sockets.end_when_unreachable(peer.connection, 0)  # a reader of large data may be slow
        return peer.connection, peer.seal, bytes(peer.incoming)

    def cut(self, seconds: float) -> None:
        """Ends all connections and takes and makes none for some time, as if the node's cable had been pulled."""
        self._cut_until = self._clock() + seconds
        for peer in [*self._peers, *self._strangers]:
            self._end(peer)

    @property
    def is_cut(self) -> bool:
        """Returns whether a rehearsed network partition cuts the node off at present."""
        return self._clock() < self._cut_until

    def close(self) -> None:
        """Closes all connections and the listening socket."""
        for peer in [*self._peers, *self._strangers]:
            self._end(peer)
        self._selector.close()
        self._listening.close()

    # -- one connection --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(self._most):
            try:
                connection, address = self._listening.accept()
            except OSError:
                return
            if self.is_cut:
                connection.close()
                continue
            connection.setblocking(False)
            if len(self._strangers) >= self._most:
                self._end(next(iter(self._strangers)))
            peer = Peer(connection, address[:2], self._secret, dialled=False, unsent=self._unsent)
            self._add(peer, selectors.EVENT_READ)
            self._write(peer)

    def _add(self, peer: Peer, mask: int) -> None:
        with suppress(OSError):
            peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets.end_when_unreachable(peer.connection, UNREACHABLE)
        self._strangers[peer] = None
        peer.mask = mask
        self._selector.register(peer.connection, mask, peer)

    def _read(self, peer: Peer) -> list[Happening]:
        found: list[Happening] = []
        try:
            data = peer.connection.recv(AT_ONCE)
            if not data:
                raise ConnectionResetError
            peer.incoming += data
            for happening in peer.take():
                if isinstance(happening, Up):
                    self._strangers.pop(peer, None)
                    self._peers.add(peer)
                found.append(happening)
        except BlockingIOError:
            pass
        except (OSError, PeerRefused):
            self._end(peer)
        return found

    def _write_all(self) -> None:
        unsent = [*self._unsent]
        self._unsent.clear()
        for peer in unsent:
            if not peer.is_over:
                self._write(peer)

    def _write(self, peer: Peer) -> None:
        try:
            if peer.outgoing:
                sent = peer.connection.send(memoryview(peer.outgoing)[:AT_ONCE])
                del peer.outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._end(peer)
            return
        if len(peer.outgoing) > BACKLOG:
            self._end(peer)
            return
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        if mask != peer.mask:
            peer.mask = mask
            self._selector.modify(peer.connection, mask, peer)

    def _end(self, peer: Peer) -> None:
        if not peer.is_over:
            self._forget(peer)
            peer.is_over = True
            peer.connection.close()
            self._over.append(peer.down())

    def _forget(self, peer: Peer) -> None:
        self._strangers.pop(peer, None)
        self._peers.discard(peer)
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
