"""The network interface of a process' groups, and its threads."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker.hardware import processor
from stoker.job.layout import Layout
from stoker.launch import worker
from stoker.launch.process_group import bind_to, bind_to_loopback


def test_a_variable_of_the_user_is_kept_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "ib0"})
    bind_to("eth0")
    assert os.environ == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"}
    bind_to_loopback()
    assert os.environ == {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}


def test_a_single_process_has_the_threads_that_its_control_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    spec: Any = SimpleNamespace(layout=Layout(), devices=None, loaded=None)
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr(processor, "control_group_limits", lambda: (None, 1.5))
        with worker._mesh(spec, None):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_collectives_wait_as_long_as_a_process_may_be_silent() -> None:
    assert worker.collective_timeout("auto") == worker.collective_timeout(60.0) == worker.TIMEOUT
    assert worker.collective_timeout(2 * worker.TIMEOUT) == 2 * worker.TIMEOUT
