"""The network interface of a process' groups."""

from __future__ import annotations

import os

import pytest

from stoker.launch.process_group import bind_to, bind_to_loopback


def test_a_variable_of_the_user_is_kept_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "ib0"})
    bind_to("eth0")
    assert os.environ == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"}
    bind_to_loopback()
    assert os.environ == {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
