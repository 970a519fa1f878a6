"""Clusters: as written, as published, and what is wrong with them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from stoker.errors import UserError
from stoker.hardware import processor
from stoker.hardware.machines import detect_machine
from stoker.hardware.machines.cluster import Cluster, failures_of
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.hardware.machines.device_names import device_kind
from stoker.hardware.machines.network import parse_network
from stoker.hardware.machines.nodes import NODE_TYPES
from stoker.hardware.measured.calibration import Calibration, Curve, MatmulTable


@pytest.mark.parametrize(
    ("text", "gbs", "rails"),
    [
        ("4x100Gb RoCE", 50, 4),
        ("1600 Gb/s RoCE", 200, 1),
        ("800 Gb/s per node", 100, 1),
        ("NVLink intra, 8x HDR200 IB per node", 200, 8),
        ("NVLink intra, IB 100Gb/s inter", 12.5, 1),
        ("400Gb/s x 8", 400, 8),
        ("8xNDR", 400, 8),
        ("3.2 Tb/s EFA", 400, 1),
        ("25 GB/s", 25, 1),
        ("100GbE", 12.5, 1),
        ("10 Gbit/s Ethernet", 1.25, 1),
        ("NVLink 900 GB/s, 8 x 400 Gbps", 400, 8),
        ("200Gb/s HDR per GPU", 200, 8),
    ],
)
def test_a_network_in_words(text: str, gbs: float, rails: int) -> None:
    network = parse_network(text)
    assert network is not None
    assert (network.gbs, network.rails) == (gbs, rails)


@pytest.mark.parametrize(
    "text", ["NVLink", "single node NVLink", "NVLink intra-node, EFA inter-node", "InfiniBand", ""]
)
def test_words_that_name_no_rate(text: str) -> None:
    assert parse_network(text) is None


def test_efa_is_what_aws_gives_to_nodes_of_the_device() -> None:
    text = "NVLink intra-node, EFA inter-node"

    def gbs_of(text: str, device: str) -> float | None:
        network = parse_network(text, device_kind(device))
        return network and network.gbs

    assert gbs_of(text, "H100") == 400  # 3,200 Gb/s of a p5
    assert gbs_of(text, "A100-40GB") == 50  # 400 Gb/s of a p4d


def test_a_cluster_in_yaml() -> None:
    cluster = load_cluster("{device: H100, per_node: 8, nodes: 4, network: 400Gb/s x 8, price: 98.32}")
    assert (cluster.gpus, cluster.network_gbs, cluster.rails) == (32, 400, 8)
    assert cluster.total_price_per_hour == pytest.approx(393.28)
    like = "like: gb200-nvl72\nnetwork: 400 Gb/s per GPU\n"
    assert load_cluster(like).network_gbs == load_cluster(f"{like}per_node: 72\n").network_gbs == 72 * 50


def test_a_file_and_its_text_are_the_same(tmp_path: Path) -> None:
    text = "like: aws-p4de\nnodes: 16\navailability: 0.999\ncurrency: EUR\nmemory_gib: 70\n"
    file = tmp_path / "rented.yaml"
    file.write_text(text)
    assert load_cluster(file) == load_cluster(str(file)) == load_cluster(text)
    cluster = load_cluster(text)
    assert (cluster.gpus, cluster.network_gbs, cluster.device.memory_gib, cluster.currency) == (128, 50, 70, "EUR")


@pytest.mark.parametrize(
    ("text", "device", "nodes", "per_node"),
    [
        ("H100", "H100-80GB-SXM", 1, 1),
        ("8xH100", "H100-80GB-SXM", 1, 8),
        ("64xH100", "H100-80GB-SXM", 8, 8),
        ("4x8xA100-80GB", "A100-80GB-SXM", 4, 8),
        ("4 x dgx-h100", "H100-80GB-SXM", 4, 8),
        ("aws-p4d", "A100-40GB-SXM", 1, 8),
        ("8 x RTX 4090", "RTX4090-24GB", 1, 8),
        ("128xGB200", "GB200-186GB", 2, 64),
        ("12xH100", "H100-80GB-SXM", 2, 6),
    ],
)
def test_a_cluster_in_words(text: str, device: str, nodes: int, per_node: int) -> None:
    cluster = load_cluster(text)
    assert (cluster.device.name, cluster.nodes, cluster.per_node) == (device, nodes, per_node)


def test_part_of_a_node_has_its_share_of_it() -> None:
    whole, half = load_cluster("8xH100"), load_cluster("4xH100")
    assert half.network_gbs == whole.network_gbs / 2
    assert half.host_memory_gib == whole.host_memory_gib / 2
    assert half.host_cores == whole.host_cores / 2
    assert load_cluster("24xH100").nodes == 3


def test_every_published_node_is_whole() -> None:
    assert len({node.name for node in NODE_TYPES}) == len(NODE_TYPES)
    for node in NODE_TYPES:
        cluster = load_cluster(node.name)
        assert (cluster.device.name, cluster.gpus, cluster.name) == (node.device, node.per_node, node.name)
        assert cluster.price_per_hour is None


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("{device: H100, pernode: 8}", ["cluster:1:16: unknown key `pernode`; write `per_node`"]),
        (
            "device: H100\nnodes: many\ngpus_per_node: 8\n",
            [
                "cluster:2:8: `nodes` must be a whole number above 0, not 'many'",
                "cluster:3:1: unknown key `gpus_per_node`; write `per_node`",
            ],
        ),
        ("nodes: 2\ndevice: H101", ["cluster:2:9: `H101` is not a device of the catalogue; write H100"]),
        ("like: aws-p9", ["cluster:1:7: `aws-p9` is not a type of node; write aws-p5"]),
        ("nodes: 2", ["neither `device` nor `like` is given"]),
        (
            "{device: H100, network: fast}",
            ["cluster:1:25: `network: fast` does not contain a rate; write it as `8 x 400 Gb/s`"],
        ),
        ("{device: H100, availability: 1.0}", ["cluster:1:30: `availability` must be a number above 0 and below 1"]),
        ("{device: H100, availability: 0.9, failures_per_gpu_hour: 1.0e-5}", ["say the same; keep one of them"]),
        ("device: [H100", ["a list is not closed"]),
        ("8xH1O0", ["`H1O0` is not a device of the catalogue; write H100"]),
        ("aws-p7", ["`aws-p7` is not a cluster; write aws-p5"]),
        ("0xH100", ["has no devices"]),
        ("11xH100", ["11 devices cannot be divided into equal nodes of up to 8; write 8 or 16"]),
        ("999999999989xH100", ["write 999999999984 or 999999999992"]),  # a prime number
        ("absent.yaml", ["absent.yaml: there is no such file"]),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, messages: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_cluster(text)
    told = [str(problem) for problem in error.value.problems]
    assert len(told) == len(messages)
    for message, line in zip(messages, told, strict=True):
        assert message in line


def test_failures_are_those_of_the_published_run() -> None:
    cluster = load_cluster("2048x8xH100")
    mean = 1 / (cluster.gpus * cluster.failures_per_gpu_hour)
    assert mean == pytest.approx(3.09, abs=0.01)  # hours between interruptions, Llama 3 405B


def test_availability_and_rate_say_the_same() -> None:
    cluster = load_cluster("{device: H100, nodes: 125, availability: 0.999}")
    assert cluster.monthly_availability == pytest.approx(0.999)
    assert 1 - math.exp(-cluster.gpus * failures_of(0.999) * 730) == pytest.approx(0.632, abs=0.001)


def test_a_processor_is_divided_among_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    one, two = detect_machine.this_processor(), detect_machine.this_processor(2)
    assert (one.gpus, two.gpus) == (1, 2)
    assert two.device.memory_gib == one.device.memory_gib / 2
    assert two.device.peak("fp32") == one.device.peak("fp32") / 2
    assert "not" not in one.name and "--calibrate" in one.notes[0]


def test_a_machine_has_what_its_control_group_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for module in (processor, detect_machine):
        monkeypatch.setattr(module, "control_group_limits", lambda: (2**30, 4.5))
    cluster = detect_machine.this_processor(2)
    assert (cluster.host_cores, cluster.host_memory_gib, cluster.device.memory_gib) == (4, 1.0, 0.5)
    monkeypatch.setattr(detect_machine, "_visible_gpus", lambda: [("NVIDIA H100 80GB HBM3", 79.19)] * 4)
    cluster = detect_machine.this_machine()
    assert (cluster.host_cores, cluster.host_memory_gib, cluster.device.memory_gib) == (4, 1.0, 79.19)
    monkeypatch.setattr(processor, "control_group_limits", lambda: (None, 0.5))
    assert processor.available_cores() == 1
    monkeypatch.setattr(processor, "control_group_limits", lambda: (None, None))
    assert processor.available_cores() == 64


def test_what_was_measured_is_what_this_machine_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    monkeypatch.setattr(detect_machine, "available_cores", lambda: 2)
    monkeypatch.setattr(detect_machine, "processor_name", lambda: "Slow")
    monkeypatch.setattr(detect_machine, "_visible_gpus", list)
    calibration = _calibration("Slow", threads=2)
    calibration.save()
    cluster: Cluster = detect_machine.this_machine()
    assert cluster.calibration == calibration
    (note,) = cluster.notes
    assert "calibrated on" in note
    assert cluster.device.peak("fp32") == pytest.approx(2 * 64**3 / 1e-4)
    assert cluster.device.memory_gbs == pytest.approx(2.0)
    assert detect_machine.this_processor(2).calibration is None  # with one thread each, which was not measured


def test_a_known_gpu_is_the_catalogues_with_the_memory_that_is_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    monkeypatch.setattr(detect_machine, "_visible_gpus", lambda: [("NVIDIA H100 80GB HBM3", 79.19)] * 4)
    cluster = detect_machine.this_machine()
    assert (cluster.device.name, cluster.device.memory_gib, cluster.gpus) == ("H100-80GB-SXM", 79.19, 4)
    monkeypatch.setattr(detect_machine, "_visible_gpus", lambda: [("NVIDIA Z9", 10.0)])
    with pytest.raises(UserError, match="NVIDIA Z9, is not in the catalogue and has not been measured"):
        detect_machine.this_machine()


def test_gpus_of_several_kinds_are_those_that_processes_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Process n has GPU n, or the n-th that `parallel.devices` names."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    large, small = ("NVIDIA A100-SXM4-80GB", 79.2), ("Tesla T4", 14.6)
    monkeypatch.setattr(detect_machine, "_visible_gpus", lambda: [large, small, (large[0], 79.1)])
    cluster = detect_machine.this_machine()
    assert (cluster.gpus, cluster.device.name) == (1, "A100-80GB-SXM")
    assert any("only the first 1 of 3 GPUs" in note for note in cluster.notes)
    named = detect_machine.this_machine(devices=[0, 2])
    assert (named.gpus, named.device.name, named.device.memory_gib) == (2, "A100-80GB-SXM", 79.1)
    assert detect_machine.this_machine(devices=[1]).device.name.startswith("T4")


def _calibration(device: str, *, threads: int) -> Calibration:
    """The present calibration: products of 16 and 64, each 2^k of them slower, and a memory of 2 GB/s."""
    from datetime import date
    from importlib.metadata import version

    table = MatmulTable("fp32", (16, 64), tuple(1e-5 if i < 7 else 1e-4 for i in range(8)))
    curve = Curve("copy", (1000, 10**9), (1e-6, 0.5))
    return Calibration(date.today().isoformat(), "here", device, threads, version("torch"), (table,), (curve,), 1e-6)


def test_nodes_have_at_least_half_of_a_full_nodes_devices() -> None:
    cluster = load_cluster("44xH100")
    assert (cluster.nodes, cluster.per_node) == (11, 4)
