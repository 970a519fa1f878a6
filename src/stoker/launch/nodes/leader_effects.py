"""Side effects of a leader: messages to nodes, lines for the user, locks and sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.launch.nodes.channel import Address, Message
from stoker.launch.nodes.group import Node


@dataclass(frozen=True)
class LeaderEffects:
    """The leader's side effects.

    Attributes:
        send: sends a message to a node.
        say: prints a line for the user.
        hold: locks the run's folder; returns the name of its marker file, or None while another process holds the lock.
        release: releases the run's folder: another group, from which this node is cut off, may continue the run.
        store: opens the socket of the rendezvous store of several nodes; gets the node of rank 0, returns its address.
    """

    send: Callable[[str, Message], None]
    say: Callable[[str], None]
    hold: Callable[[], str | None]
    release: Callable[[], None]
    store: Callable[[Node], Address]
