"""Hosts that are not as libraries expect: what is set for them, and that what the user set stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.hardware.host_facts import HostFacts, host_facts
from stoker.hardware.quirks import in_one_line, quirks_of
from stoker.units import MIB

NODES = ("10.0.0.1", "10.0.0.2")
PLAIN = HostFacts(gpus=("NVIDIA H100 80GB HBM3",) * 8, infiniband=True, shm=2**36, cores=64)


def settings(facts: HostFacts, environment: dict[str, str] | None = None, **options: object) -> dict[str, str]:
    given = {"processes": 8, **options}
    return {k: v for quirk in quirks_of(facts, environment or {}, **given) for k, v in quirk.variables.items()}  # type: ignore[arg-type]


def changed(**values: object) -> HostFacts:
    return HostFacts(**{**PLAIN.__dict__, **values})


def test_a_plain_host_has_none() -> None:
    assert quirks_of(PLAIN, {}, processes=8, meet=NODES) == []
    assert quirks_of(HostFacts(shm=MIB, cores=2), {}, processes=2, meet=NODES) == []  # no GPU


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (changed(gpus=("NVIDIA GeForce RTX 4090",) * 2), {"NCCL_P2P_DISABLE": "1"}),
        (changed(gpus=("NVIDIA GeForce RTX 5090",) * 2), {"NCCL_P2P_DISABLE": "1"}),
        (changed(gpus=("NVIDIA GeForce RTX 3090",) * 2), {}),  # NVLink bridges exist
        (changed(gpus=("NVIDIA GeForce RTX 4090",)), {}),
        (changed(infiniband=False), {"NCCL_IB_DISABLE": "1"}),
        (changed(mig=True), {"NCCL_P2P_DISABLE": "1"}),
        (changed(shm=64 * MIB), {"NCCL_SHM_DISABLE": "1"}),
        (changed(core_limit=16.0), {"OMP_NUM_THREADS": "2"}),
        (changed(core_limit=4.0), {"OMP_NUM_THREADS": "1"}),
        (changed(core_limit=64.0), {}),
    ],
)
def test_what_is_set(facts: HostFacts, expected: dict[str, str]) -> None:
    assert settings(facts, meet=NODES) == expected
    asked = dict.fromkeys(expected, "mine")
    assert settings(facts, asked, meet=NODES) == {}  # what the user set stays
    if expected:
        assert in_one_line(quirks_of(facts, asked, processes=8, meet=NODES)) == ""


def test_of_several_interfaces_that_of_the_node_is_named_and_taken() -> None:
    several = changed(interfaces=2)
    bound = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert settings(several, meet=NODES, interface="ib0") == bound
    line = in_one_line(quirks_of(several, {"NCCL_SOCKET_IFNAME": "eth1"}, processes=8, interface="ib0"))
    assert line == "GLOO_SOCKET_IFNAME=ib0 (2 network interfaces: ib0 has the node's address)"
    assert settings(several, bound, meet=NODES, interface="eth0") == {}  # what the user set stays
    assert settings(several, meet=NODES) == {}  # under another launcher
    assert settings(changed(interfaces=1), meet=NODES, interface="ib0") == {}


def test_one_node_needs_no_network() -> None:
    assert settings(changed(infiniband=False)) == {}


def test_what_can_only_be_said() -> None:
    mixed = changed(gpus=("NVIDIA A100", "NVIDIA A100", "NVIDIA V100"), memory_limit=512 * MIB)
    line = in_one_line(quirks_of(mixed, {}, processes=2))
    assert line == (
        "the GPUs differ (2 x NVIDIA A100, 1 x NVIDIA V100): each step takes as long as the slowest needs; "
        "the control group allows 512 MiB of memory for 2 processes"
    )
    line = in_one_line(quirks_of(changed(gpus=("NVIDIA GeForce RTX 4090",) * 2), {}, processes=2))
    assert line == "NCCL_P2P_DISABLE=1 (NVIDIA GeForce RTX 4090: no peer access)"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"http_proxy": ""}, None),
        ({"HTTPS_PROXY": "http://p:1"}, "10.0.0.1,10.0.0.2"),
        ({"http_proxy": "http://p:1", "no_proxy": "localhost, 10.0.0.2"}, "localhost,10.0.0.2,10.0.0.1"),
        ({"http_proxy": "http://p:1", "NO_PROXY": "10.0.0.1,10.0.0.2"}, None),
        ({"http_proxy": "http://p:1", "no_proxy": "*"}, None),
    ],
)
def test_nodes_are_not_asked_through_a_proxy(environment: dict[str, str], expected: str | None) -> None:
    found = settings(PLAIN, environment, meet=NODES)
    assert found == ({} if expected is None else {"no_proxy": expected, "NO_PROXY": expected})
    assert settings(PLAIN, environment) == {}


def test_facts_are_read_from_the_systems_files(tmp_path: Path) -> None:
    for bus, name in (("0000:01:00.0", "NVIDIA GeForce RTX 4090"), ("0000:02:00.0", "NVIDIA A100-SXM4-80GB")):
        folder = tmp_path / "proc/driver/nvidia/gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 5\n")
    module = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(f"{module}GCC version:  gcc version 12.3.0\n")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "memory.max").write_text("max\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    for name, kind, state in (("lo", 772, "unknown"), ("eth0", 1, "up"), ("ib0", 32, "up"), ("eth1", 1, "down")):
        folder = tmp_path / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "type").write_text(f"{kind}\n")
        (folder / "operstate").write_text(f"{state}\n")
    facts = host_facts({}, tmp_path)
    assert facts.interfaces == 2
    assert facts.gpus == ("NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB") and not facts.mig
    assert facts.infiniband and facts.core_limit == 1.5 and facts.memory_limit is None and (facts.shm or 0) > 0
    assert facts.addresses == ("0000:01:00.0", "0000:02:00.0") and facts.driver == "550.54.15"
    second = host_facts({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path)
    assert (second.gpus, second.addresses) == (("NVIDIA A100-SXM4-80GB",), ("0000:02:00.0",))
    assert host_facts({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).gpus == ()
    for variable in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):  # Kubernetes' device plugin sets the second
        assert host_facts({variable: "MIG-1a,MIG-1b"}, tmp_path).mig
    assert not host_facts({"NVIDIA_VISIBLE_DEVICES": "all"}, tmp_path).mig
    (group / "cpu.max").unlink()
    (group / "cpu").mkdir()
    (group / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (group / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (group / "memory").mkdir()
    (group / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    first = host_facts({}, tmp_path)
    assert first.core_limit is None and first.memory_limit is None
    (group / "cpu/cpu.cfs_quota_us").write_text("200000\n")
    (group / "memory/memory.limit_in_bytes").write_text("1073741824\n")
    second = host_facts({}, tmp_path)
    assert second.core_limit == 2.0 and second.memory_limit == 2**30
    assert host_facts({}, tmp_path / "nothing").gpus == ()
