"""Exchanges objects of the node cache: a process asks the supervisors of other nodes before the origin.

An object's home is one node, determined by the object's key: it fetches the object from the origin, and streams it to
the other nodes meanwhile. For an object that it lacks, a home first asks its neighbours, which may have it from an
earlier run.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import UserError
from stoker.frames import PeerRefused, Seal
from stoker.launch.nodes.addresses import host_and_port
from stoker.launch.nodes.channel import CACHE, Address, PeerNetwork, Said
from stoker.launch.nodes.group import Group
from stoker.launch.nodes.stream import Stream
from stoker.node_cache import cache_peers
from stoker.node_cache.download import Feed
from stoker.node_cache.job_urls import is_named
from stoker.node_cache.object_cache import RemoteObject, node_cache
from stoker.node_cache.object_reader import ObjectReader
from stoker.node_cache.object_version import ObjectVersion

PIECE = 4 * 2**20  # bytes of a frame
POLL = 0.02  # seconds between two looks
AGAIN = 0.2  # seconds between two attempts to reach a node that is starting
PATIENCE = 30.0  # maximum difference in seconds between the nodes' starts
NEIGHBOURS = 2  # nodes that a home asks for an object before the origin


@dataclass(frozen=True)
class NodePeers:
    """The other nodes, which a process of this one asks for objects.

    Attributes:
        name: of this node.
        nodes: name and address of each supervisor, this one's too.
        source: address that connections are made from.
        secret: of the nodes.
        patience: timeout in seconds for a home that is not reachable yet, once.
    """

    name: str
    nodes: tuple[tuple[str, Address], ...]
    source: str
    secret: bytes = field(repr=False)
    patience: float = 0.0

    @classmethod
    def of(cls, group: Group, name: str, source: str, secret: bytes) -> NodePeers | None:
        """Returns a group's peers; None if the node is alone."""
        nodes = tuple((member.node.name, member.node.address) for member in group.members)
        return cls(name, nodes, source, secret) if len(nodes) > 1 else None

    def order(self, key: str) -> list[tuple[str, Address]]:
        """Returns the nodes in the order of an object's key, its home first; the same on all nodes."""
        return sorted(self.nodes, key=lambda node: hashlib.blake2b(f"{key} {node[0]}".encode()).digest())

    def feed(self, key: str) -> Feed:
        """Returns a stream of an object's bytes: from its home, or for the home itself from neighbours that have it."""
        order = self.order(key)
        fetches = order[0][0] != self.name
        asked = [order[0]] if fetches else order[1 : 1 + NEIGHBOURS]

        def pieces(url: str, version: ObjectVersion, start: int) -> Iterator[bytes]:
            for _, address in asked:
                try:
                    yield from self._pieces(address, url, version, start, fetches=fetches)
                    return
                except _Lacking:
                    continue
            raise _Lacking(f"no other node has {url}")

        return pieces

    def _pieces(
        self, address: Address, url: str, version: ObjectVersion, start: int, *, fetches: bool
    ) -> Iterator[bytes]:
        hello = {"url": url, "version": version.plain(), "start": start, "fetch": fetches}
        try:
            with self._dialled(address, hello) as stream:
                if not stream.hear().get("has"):
                    raise _Lacking
                while piece := stream.receive():
                    yield piece
        except (PeerRefused, ValueError) as error:
            raise ConnectionError(f"the supervisor at {address[0]}:{address[1]} does not answer") from error

    def _dialled(self, address: Address, hello: dict[str, Any]) -> Stream:
        """Returns a connection to a supervisor, which may still be starting where something is to be fetched."""
        until = time.monotonic() + (self.patience if hello["fetch"] and address not in _ABSENT else 0.0)
        while True:
            try:
                return Stream.dial(address, self.secret, source=self.source, hello=hello, kind=CACHE)
            except OSError:
                if time.monotonic() >= until:
                    _ABSENT.add(address)
                    raise
            time.sleep(AGAIN)


_ABSENT: set[Address] = set()  # homes that have been waited for in vain


class _Lacking(ConnectionError):
    """A node does not have the object, and does not fetch it."""


class CacheServer:
    """Serves objects of this node's cache to other nodes, each in a thread.

    Args:
        named: the URLs of the job; no others are served or fetched.
    """

    def __init__(self, named: Sequence[str]) -> None:
        self._named = named
        self._streams: set[Stream] = set()
        self._guard = threading.Lock()
        self.served = 0  # bytes

    def receive(self, connection: socket.socket, seal: Seal, rest: bytes, hello: dict[str, Any]) -> None:
        """Takes a connection over."""
        stream = Stream(connection, seal, rest)
        with self._guard:
            self._streams.add(stream)
        threading.Thread(target=self._serve, args=(stream, hello), daemon=True, name="cache-server").start()

    def close(self) -> None:
        """Ends all connections."""
        with self._guard:
            streams, self._streams = self._streams, set()
        for stream in streams:
            stream.close()

    def _serve(self, stream: Stream, hello: dict[str, Any]) -> None:
        with suppress(OSError, PeerRefused, UserError, ValueError, KeyError, TypeError), stream:
            self._give(stream, hello)
        with self._guard:
            self._streams.discard(stream)

    def _give(self, stream: Stream, hello: dict[str, Any]) -> None:
        found = RemoteObject(str(hello["url"]), ObjectVersion.of(hello["version"]))
        named = is_named(found.url, self._named)
        if named:
            node_cache().renew(found)
        whole = node_cache().entry(found).is_whole
        if not named or not (whole or hello["fetch"]):
            stream.say({"has": False})
            return
        stream.say({"has": True})
        if not whole:  # at this node's pace, not at that of the requesting one
            threading.Thread(target=_fetch, args=(found,), daemon=True, name="cache-fetch").start()
        with ObjectReader(node_cache(), found, start=int(hello["start"])) as reader:
            while piece := reader.read(PIECE):
                stream.send(piece)
                with self._guard:
                    self.served += len(piece)
        stream.send(b"")


def _fetch(found: RemoteObject) -> None:
    """Fetches an object from its origin; who reads it meets the error, if there is one."""
    with suppress(UserError, OSError):
        node_cache().fetch(found)[1].close()


@contextmanager
def exchanging(
    network: PeerNetwork, server: CacheServer, rendezvous: Sequence[Address], secret: bytes
) -> Iterator[None]:
    """A context in which this process asks the supervisors at the rendezvous for objects, and serves theirs.

    It covers the time before the supervisors have formed a group, in which each of them reads the job's data.
    Connections for other requests are closed; the peer retries later.
    """
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            for happening in network.poll(POLL):
                if isinstance(happening, Said) and happening.message.get("kind") == CACHE:
                    server.receive(*network.detach(happening.peer), happening.message)
                elif isinstance(happening, Said):
                    network.close_peer(happening.peer)

    nodes = tuple((host_and_port(address), address) for address in rendezvous)
    thread = threading.Thread(target=answer, daemon=True, name="cache-exchange")
    thread.start()
    if set(rendezvous) != {network.address}:
        cache_peers.set_peers(NodePeers(host_and_port(network.address), nodes, network.address[0], secret, PATIENCE))
    try:
        yield
    finally:
        cache_peers.set_peers(None)
        over.set()
        thread.join()
