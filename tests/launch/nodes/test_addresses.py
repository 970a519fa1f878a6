"""Addresses of a rendezvous, as each node sees them."""

from __future__ import annotations

import pytest

from stoker.errors import CannotRun
from stoker.launch.nodes import addresses
from stoker.launch.nodes.addresses import address_towards, own_address, parsed

OWN, OTHER = "192.0.2.7", "192.0.2.8"


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of the name `here`, whose /etc/hosts has `127.0.1.1 here`."""
    known = {"here": "127.0.1.1", "there": OTHER}
    monkeypatch.setattr(addresses, "resolved", lambda host: known.get(host, host))
    monkeypatch.setattr(addresses, "is_own", lambda host: host in (OWN, "127.0.1.1", "127.0.0.1"))
    monkeypatch.setattr(addresses, "address_towards", lambda other: {OTHER: OWN}[other[0]])


@pytest.mark.parametrize(
    ("rendezvous", "found", "own"),
    [
        ("here:5,there:6", [(OWN, 5), (OTHER, 6)], (OWN, 5)),
        ("there:6,here:5", [(OTHER, 6), (OWN, 5)], (OWN, 5)),
        ("here:5", [("127.0.1.1", 5)], ("127.0.1.1", 5)),
        ("127.0.0.1:5,there:6", [("127.0.0.1", 5), (OTHER, 6)], ("127.0.0.1", 5)),  # the address itself is written
    ],
)
@pytest.mark.usefixtures("debian")
def test_a_node_whose_name_leads_to_loopback_listens_where_the_others_reach_it(
    rendezvous: str, found: list[addresses.Address], own: addresses.Address
) -> None:
    assert parsed(rendezvous) == found
    assert own_address(parsed(rendezvous), None) == own


@pytest.mark.usefixtures("debian")
def test_a_name_that_leads_to_loopback_may_be_given_to_listen_at() -> None:
    assert own_address(parsed("here:5,there:6"), "here") == (OWN, 5)
    assert own_address(parsed("there:6"), "here") == (OWN, 0)
    assert own_address(parsed("here:5"), "here") == ("127.0.1.1", 5)
    assert own_address(parsed("127.0.0.1:5,there:6"), "127.0.0.1") == ("127.0.0.1", 5)


def test_the_address_towards_another() -> None:
    assert address_towards(("127.0.0.9", 9)) == "127.0.0.1"
    with pytest.raises(CannotRun, match=r"there is no way to 255.255.255.255 from here \(.*\); name this node's"):
        address_towards(("255.255.255.255", 9))
