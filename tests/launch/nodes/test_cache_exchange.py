"""Objects between nodes: one of them asks the origin, the others ask that one."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from counting_origin import CountingOrigin

from stoker.launch.nodes import cache_exchange
from stoker.launch.nodes.cache_exchange import CacheServer, NodePeers, exchanging
from stoker.launch.nodes.channel import PeerNetwork, Said
from stoker.node_cache import cache_peers
from stoker.node_cache.cache_stats import HERE
from stoker.node_cache.object_cache import NodeCache

SECRET = bytes(range(32))
MIB = 2**20


class Lab:
    """Two supervisors on loopback addresses, each with a cache."""

    def __init__(self, base: Path, named: list[str]) -> None:
        self.caches = {name: NodeCache(base / name) for name in ("n1", "n2")}
        self.networks = {name: PeerNetwork((f"127.0.0.{2 + at}", 0), SECRET) for at, name in enumerate(self.caches)}
        self.servers = {name: CacheServer(named) for name in self.caches}
        self.nodes = tuple((name, network.address) for name, network in self.networks.items())
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._serve, args=(name,)) for name in self.caches]
        for thread in self._threads:
            thread.start()

    def peers(self, name: str, secret: bytes = SECRET) -> NodePeers:
        return NodePeers(name, self.nodes, dict(self.nodes)[name][0], secret)

    def home(self, key: str) -> str:
        """Which node fetches an object."""
        assert self.peers("n1").order(key) == self.peers("n2").order(key)
        return self.peers("n1").order(key)[0][0]

    def _serve(self, name: str) -> None:
        while not self._over.is_set():
            for happening in self.networks[name].poll(0.02):
                if isinstance(happening, Said) and happening.message["kind"] == "cache":
                    taken = self.networks[name].detach(happening.peer)
                    self.servers[name].receive(*taken, happening.message)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for each in (*self.servers.values(), *self.networks.values()):
            each.close()


@pytest.fixture
def origin() -> Iterator[CountingOrigin]:
    with CountingOrigin() as served:
        yield served


@pytest.fixture
def lab(tmp_path: Path, origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = Lab(tmp_path, [f"{origin.url}/data/"])
    origin.objects["data/x"] = random.Random(1).randbytes(5 * MIB + 7)
    yield made
    cache_peers.set_peers(None)
    made.close()


def serve_from(lab: Lab, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisors answer from this node's cache; they themselves ask no other nodes."""
    own = NodeCache(lab.caches[name].root, lambda _: None)
    monkeypatch.setattr(cache_exchange, "node_cache", lambda: own)


def read(lab: Lab, name: str, url: str, secret: bytes = SECRET) -> bytes:
    """An object as a process of a node gets it."""
    cache_peers.set_peers(lab.peers(name, secret))
    found = lab.caches[name].version(url)
    path, pin = lab.caches[name].fetch(found)
    with pin:
        return path.read_bytes()


def test_the_origin_is_asked_once_for_both_nodes(
    lab: Lab, origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, data = f"{origin.url}/data/x", origin.objects["data/x"]
    home = lab.home(lab.caches["n1"].version(url).key)
    other = "n2" if home == "n1" else "n1"
    serve_from(lab, home, monkeypatch)
    before = HERE.counts
    assert read(lab, other, url) == data  # the home fetches it for the other node
    assert origin.sent == {"data/x": len(data)}
    assert (HERE.counts - before).peer_bytes == len(data)
    serve_from(lab, other, monkeypatch)
    assert read(lab, home, url) == data and origin.sent == {"data/x": len(data)}
    assert lab.servers[home].served == len(data)


def test_a_home_that_lost_its_disk_asks_its_neighbours(
    lab: Lab, origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, data = f"{origin.url}/data/x", origin.objects["data/x"]
    home = lab.home(lab.caches["n1"].version(url).key)
    other = "n2" if home == "n1" else "n1"
    cache_peers.set_peers(None)
    lab.caches[other].fetch(lab.caches[other].version(url))[1].close()  # from an earlier run
    serve_from(lab, other, monkeypatch)
    assert read(lab, home, url) == data and origin.sent == {"data/x": len(data)}


@pytest.mark.parametrize("what", ["gone", "another secret", "not of the job"])
def test_where_no_node_gives_it_the_origin_does(
    what: str, lab: Lab, origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "other" if what == "not of the job" else "data/x"
    origin.objects["other"] = bytes(MIB)
    url = f"{origin.url}/{name}"
    home = lab.home(lab.caches["n1"].version(url).key)
    other = "n2" if home == "n1" else "n1"
    serve_from(lab, home, monkeypatch)
    if what == "gone":
        lab.networks[home].cut(60)
    secret = bytes(32) if what == "another secret" else SECRET
    assert read(lab, other, url, secret) == origin.objects[name]
    assert origin.sent[name] == len(origin.objects[name]) and lab.servers[home].served == 0


def test_what_a_lost_peer_left_is_completed_by_the_origin(
    lab: Lab, origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, data = f"{origin.url}/data/x", origin.objects["data/x"]
    home = lab.home(lab.caches["n1"].version(url).key)
    other = "n2" if home == "n1" else "n1"
    serve_from(lab, home, monkeypatch)
    lab.caches[home].fetch(lab.caches[home].version(url))[1].close()
    send, sent = cache_exchange.Stream.send, []

    def breaking(stream: cache_exchange.Stream, payload: bytes) -> None:
        if len(payload) > 1000:
            sent.append(len(payload))
            if len(sent) == 2:
                stream.close()
                raise ConnectionError
        send(stream, payload)

    monkeypatch.setattr(cache_exchange.Stream, "send", breaking)
    before = origin.total
    assert read(lab, other, url) == data
    assert origin.total - before == len(data) - cache_exchange.PIECE


def test_bytes_that_the_home_did_not_check_are_not_kept(
    lab: Lab, origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that finds damage when it has sent all bytes ends the connection without the end frame."""
    url, data = f"{origin.url}/data/x", origin.objects["data/x"]
    home = lab.home(lab.caches["n1"].version(url).key)
    other = "n2" if home == "n1" else "n1"
    serve_from(lab, home, monkeypatch)
    send, sent = cache_exchange.Stream.send, []

    def damaged(stream: cache_exchange.Stream, payload: bytes) -> None:
        if not payload:
            stream.close()
            raise ConnectionError
        if not payload.startswith(b'{"'):  # a part of the object, which may be of a few bytes
            sent.append(len(payload))
            payload = bytes(len(payload))
        send(stream, payload)

    monkeypatch.setattr(cache_exchange.Stream, "send", damaged)
    assert read(lab, other, url) == data
    assert sum(sent) == len(data)


def test_a_home_that_starts_late_is_waited_for_once(origin: CountingOrigin, tmp_path: Path) -> None:
    """Supervisors begin to listen some time apart; one that never comes costs its patience once, not once a file."""
    cache = NodeCache(tmp_path / "late", lambda _: None)
    origin.objects["data/x"] = data = bytes(range(256)) * 100
    found = cache.version(f"{origin.url}/data/x")
    with socket.create_server(("127.0.0.4", 0)) as free:
        address = free.getsockname()[:2]
    peers = NodePeers("me", (("home", address),), "127.0.0.5", SECRET, patience=0.3)
    for limits in ((0.3, 2.0), (0.0, 0.2)):
        began = time.monotonic()
        with pytest.raises(OSError):
            list(peers.feed(found.key)(found.url, found.version, 0))
        assert limits[0] <= time.monotonic() - began < limits[1]
    cache_exchange._ABSENT.discard(address)

    def listen_later() -> None:
        time.sleep(0.4)
        network = PeerNetwork(address, SECRET)
        with exchanging(network, CacheServer([found.url]), [address], SECRET):
            over.wait(20)
        network.close()

    over = threading.Event()
    thread = threading.Thread(target=listen_later)
    thread.start()
    patient = NodePeers("me", (("home", address),), "127.0.0.5", SECRET, patience=10)
    assert b"".join(patient.feed(found.key)(found.url, found.version, 100)) == data[100:]
    over.set()
    thread.join()
    assert origin.sent == {"data/x": len(data)}


def test_an_object_of_another_job_is_not_served_though_it_is_in_the_cache(
    lab: Lab, origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's key may be needed for it, which the nodes of this job do not have."""
    origin.objects["other"] = data = bytes(range(256)) * 100
    url = f"{origin.url}/other"
    home = lab.home(lab.caches["n1"].version(url).key)
    other = "n2" if home == "n1" else "n1"
    cache_peers.set_peers(None)
    lab.caches[home].fetch(lab.caches[home].version(url))[1].close()
    serve_from(lab, home, monkeypatch)
    assert read(lab, other, url) == data
    assert origin.sent["other"] == 2 * len(data) and lab.servers[home].served == 0
