"""The channel between supervisors: messages arrive, strangers learn nothing and cost nothing."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from stoker.frames import CHALLENGE, LARGEST, MAC, Greeting, PeerRefused
from stoker.launch.nodes import channel
from stoker.launch.nodes import stream as stream_module
from stoker.launch.nodes.channel import UNREACHABLE, Down, Happening, Message, Peer, PeerNetwork, Said, Up
from stoker.launch.nodes.stream import Stream

SECRET = bytes(range(32))
HOST = "127.0.0.1"


@pytest.fixture
def networks() -> Iterator[Callable[..., PeerNetwork]]:
    made: list[PeerNetwork] = []

    def make(secret: bytes = SECRET, host: str = HOST) -> PeerNetwork:
        made.append(PeerNetwork((host, 0), secret))
        return made[-1]

    yield make
    for network in made:
        network.close()


def until(what: Callable[[list[Happening]], bool], *networks: PeerNetwork, seconds: float = 5.0) -> list[Happening]:
    """What happens on all of them until a condition on it holds."""
    found: list[Happening] = []
    deadline = time.monotonic() + seconds
    while not what(found):
        assert time.monotonic() < deadline, found
        for network in networks:
            found += network.poll(0.01)
    return found


def said(found: list[Happening]) -> list[Message]:
    return [happening.message for happening in found if isinstance(happening, Said)]


def meet(a: PeerNetwork, b: PeerNetwork) -> tuple[Peer, Peer]:
    """A connection that ``a`` made, and its other end."""
    dialled = a.dial(b.address)
    ups = [h.peer for h in until(lambda found: sum(isinstance(h, Up) for h in found) == 2, a, b) if isinstance(h, Up)]
    return dialled, next(peer for peer in ups if peer is not dialled)


def test_messages_arrive_in_order_both_ways(networks: Callable[..., PeerNetwork]) -> None:
    a, b = networks(), networks(host="127.0.0.2")
    here, there = meet(a, b)
    large = "x" * 300_000
    for number in range(50):
        here.send({"number": number, "text": large if number == 25 else ""})
        there.send({"back": number})
    found = said(until(lambda found: len(said(found)) == 100, a, b))
    assert [m["number"] for m in found if "number" in m] == list(range(50))
    assert [m["back"] for m in found if "back" in m] == list(range(50))
    assert there.address[0] == HOST  # of the address that it was told to use
    b.close_peer(there)
    assert [type(h) for h in until(lambda found: len(found) == 2, a, b)] == [Down, Down]


def test_another_secret_is_refused_on_both_sides(networks: Callable[..., PeerNetwork]) -> None:
    a, b = networks(), networks(os.urandom(32))
    dialled = a.dial(b.address)
    found = until(lambda found: len(found) == 2, a, b)
    assert all(isinstance(happening, Down) for happening in found) and not dialled.is_up
    assert [h.refused for h in found if isinstance(h, Down) and h.peer is dialled] == [True]


def test_nobody_listening_is_no_refusal(networks: Callable[..., PeerNetwork]) -> None:
    a = networks()
    with socket.create_server((HOST, 0)) as free:
        address = free.getsockname()
    a.dial(address)
    (down,) = until(bool, a)
    assert isinstance(down, Down) and not down.refused


def stranger(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address, timeout=5)
    connection.settimeout(5)
    return connection


@pytest.mark.parametrize("seed", range(20))
def test_bytes_of_a_stranger_end_its_connection_and_nothing_else(
    networks: Callable[..., PeerNetwork], seed: int
) -> None:
    a, b = networks(), networks()
    here, _ = meet(a, b)
    drawn = random.Random(seed)
    with stranger(b.address) as connection:
        b.poll(1.0)  # it is accepted, and gets the challenge
        connection.sendall(drawn.randbytes(drawn.randrange(CHALLENGE + MAC, 4000)))
        found = until(lambda found: any(isinstance(h, Down) for h in found), a, b)
        assert not said(found)
        rest = b""
        try:
            while more := connection.recv(4096):
                rest += more
        except ConnectionResetError:
            pass
        assert len(rest) <= CHALLENGE  # a random challenge, and no proof
    here.send({"still": "there"})
    assert said(until(lambda found: bool(said(found)), a, b)) == [{"still": "there"}]


def test_strangers_that_say_nothing_give_way_and_are_dropped(
    networks: Callable[..., PeerNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "GREETING", 0.3)
    a, b = networks(), networks()
    silent = [stranger(b.address) for _ in range(channel.STRANGERS + 10)]
    here, _ = meet(a, b)
    assert len(b._strangers) <= channel.STRANGERS
    time.sleep(0.4)
    b.poll(0.0)
    assert not b._strangers and here.is_up
    for connection in silent:
        connection.close()


def test_no_more_strangers_than_allowed_are_kept() -> None:
    network = PeerNetwork((HOST, 0), SECRET, strangers=2)
    silent = [stranger(network.address) for _ in range(3)]
    for _ in range(3):
        network.poll(0.1)
    assert len(network._strangers) == 2
    for connection in (*silent, network):
        connection.close()


def pair() -> tuple[Greeting, Greeting]:
    """Both sides of a connection that has been greeted."""
    a, b = Greeting(SECRET, dialled=True), Greeting(SECRET, dialled=False)
    a.answer(b.answer(a.answer(b.first)))
    assert a.seal is not None and b.seal is not None
    return a, b


def parts(frame: bytes) -> tuple[bytes, bytes]:
    return frame[:4], frame[4:]


def test_a_frame_that_is_changed_repeated_left_out_or_sent_back_is_refused() -> None:
    a, b = pair()
    assert a.seal is not None and b.seal is not None
    frames = [a.seal.frame(b"%d" % number) for number in range(3)]
    changed = bytearray(frames[0])
    changed[4] ^= 1
    for wrong in (bytes(changed), frames[1]):
        with pytest.raises(PeerRefused):
            b.seal.payload(*parts(wrong))
    assert b.seal.payload(*parts(frames[0])) == b"0"
    with pytest.raises(PeerRefused):
        b.seal.payload(*parts(frames[0]))
    with pytest.raises(PeerRefused):
        a.seal.payload(*parts(frames[1]))
    other, _ = pair()
    assert other.seal is not None
    with pytest.raises(PeerRefused):
        b.seal.payload(*parts(other.seal.frame(b"1")))


def test_a_proof_cannot_be_sent_back() -> None:
    """Who dials gives its proof first; the one who accepted may not answer with it."""
    a = Greeting(SECRET, dialled=True)
    answer = a.answer(bytes(CHALLENGE))
    with pytest.raises(PeerRefused):
        a.answer(answer[CHALLENGE:])


def test_a_frame_that_is_too_long_is_refused_before_it_comes() -> None:
    a, _ = pair()
    assert a.seal is not None
    with pytest.raises(PeerRefused):
        a.seal.length(struct.pack(">I", LARGEST + 1))
    with pytest.raises(ValueError):
        a.seal.frame(bytes(LARGEST + 1))


def test_the_kernel_ends_a_connection_to_an_unreachable_host_until_another_owner_has_it(
    networks: Callable[..., PeerNetwork],
) -> None:
    a, b = networks(), networks()
    here, there = meet(a, b)
    for side in (here.connection, there.connection):
        assert side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        tcp = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
        idle, interval, count, longest = (side.getsockopt(socket.IPPROTO_TCP, option) for option in tcp)
        assert idle + interval * count == UNREACHABLE == longest / 1000
    connection, _, _ = a.detach(here)
    assert not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    connection.close()


def test_a_node_that_is_cut_off_takes_and_makes_no_connection(networks: Callable[..., PeerNetwork]) -> None:
    a, b = networks(), networks()
    meet(a, b)
    b.cut(0.3)
    assert len(until(lambda found: len(found) == 2, a, b)) == 2
    b.dial(a.address)
    a.dial(b.address)
    assert all(isinstance(happening, Down) for happening in until(lambda found: len(found) == 2, a, b))
    time.sleep(0.3)
    meet(a, b)


def test_the_end_of_a_connection_that_was_up_is_no_refusal(networks: Callable[..., PeerNetwork]) -> None:
    """Three refusals are taken for another secret."""
    a, b = networks(), networks()
    here, there = meet(a, b)
    b.close_peer(there)
    found = until(lambda found: any(isinstance(h, Down) and h.peer is here for h in found), a, b)
    assert not any(isinstance(happening, Down) and happening.refused for happening in found)


def test_a_peer_that_reads_nothing_is_dropped(
    networks: Callable[..., PeerNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "BACKLOG", 2**20)
    a, b = networks(), networks()
    here, _ = meet(a, b)
    found: list[Happening] = []
    for _ in range(100):  # more than the system keeps for it
        here.send({"text": "x" * 2**18})
        found += a.poll(0.0)
    assert [happening.peer for happening in found if isinstance(happening, Down)] == [here]
    assert len(here.outgoing) < 2**21


@pytest.mark.parametrize("text", [b"[1]", b"no JSON", b"\xff"])
def test_a_peer_that_says_something_else_than_a_message_is_dropped(
    networks: Callable[..., PeerNetwork], text: bytes
) -> None:
    a, b = networks(), networks()
    here, there = meet(a, b)
    here.send_text(text)
    found = until(lambda found: any(isinstance(h, Down) and h.peer is there for h in found), a, b)
    assert not said(found)


def test_what_follows_the_hello_of_another_owner_is_left_to_it(networks: Callable[..., PeerNetwork]) -> None:
    a, b = networks(), networks()
    for kind in (channel.COPIES, channel.CACHE):
        here, there = meet(a, b)
        for message in ({"kind": kind}, {"kind": "next"}):
            here.send(message)
        assert said(until(lambda found: bool(said(found)), a, b)) == [{"kind": kind}]
        a.poll(0.05)
        b.poll(0.05)
        connection, seal, rest = b.detach(there)
        with Stream(connection, seal, rest) as stream:
            assert stream.hear() == {"kind": "next"}


def test_a_last_message_is_sent_before_a_connection_is_closed(networks: Callable[..., PeerNetwork]) -> None:
    a, b = networks(), networks()
    here, _ = meet(a, b)
    here.send({"kind": "elsewhere"})
    a.close_peer(here)
    assert said(until(lambda found: bool(said(found)), a, b)) == [{"kind": "elsewhere"}]


def test_a_stream_waits_patiently_for_the_next_message_only(
    networks: Callable[..., PeerNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "WAIT", 0.2)
    a, b = networks(), networks()
    here, there = meet(a, b)
    connection, seal, rest = b.detach(there)
    with Stream(connection, seal, rest) as stream:
        assert connection.gettimeout() == 0.2  # also of a first frame, and of what is sent
        with pytest.raises(TimeoutError):
            stream.hear()
        here.send({"kind": "next"})
        a.poll(0.0)
        assert stream.hear(patient=True) == {"kind": "next"}
        with pytest.raises(TimeoutError):
            stream.receive()
