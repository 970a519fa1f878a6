"""Types of nodes that can be bought or rented: devices, network, host. Prices change and are the user's to give."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.hardware.machines.device_catalogue import DeviceKind


@dataclass(frozen=True)
class NodeType:
    """A node as its maker or cloud publishes it.

    Attributes:
        device: a name of the catalogue of devices.
        per_node: devices that one NVLink or PCIe domain joins.
        network: as `stoker.hardware.machines.network.parse_network` reads it.
        host_memory_gib: GiB of the host.
        host_cores: cores; hardware threads where a cloud sells those.
        source: where the figures are from.
    """

    name: str
    device: str
    per_node: int
    network: str
    host_memory_gib: float
    host_cores: int
    source: str


_DGX = "NVIDIA DGX datasheet"
_AWS = "AWS EC2 accelerated instances page"
_GCP = "Google Cloud GPU machine types page"
_AZURE = "Azure ND-series pages"
_MI350 = "AMD MI350 platform brief: a 400 Gb/s port a GPU"

# The first node of a device is taken where a cluster names only the device.
# fmt: off
NODE_TYPES = (
    NodeType("dgx-1", "V100-16GB-SXM2", 8, "4x100 Gb/s", 512, 40, _DGX),
    NodeType("dgx-1-32gb", "V100-32GB-SXM2", 8, "4x100 Gb/s", 512, 40, _DGX),
    NodeType("dgx-2", "V100-32GB-SXM2", 16, "8x100 Gb/s", 1536, 48, _DGX),
    NodeType("dgx-a100", "A100-80GB-SXM", 8, "8x200 Gb/s", 2048, 128, _DGX),
    NodeType("dgx-a100-40gb", "A100-40GB-SXM", 8, "8x200 Gb/s", 1024, 128, _DGX),
    NodeType("dgx-a800", "A800-80GB-SXM", 8, "8x200 Gb/s", 2048, 128, "as the DGX A100"),
    NodeType("dgx-h100", "H100-80GB-SXM", 8, "8x400 Gb/s", 2048, 112, _DGX),
    NodeType("dgx-h800", "H800-80GB-SXM", 8, "8x400 Gb/s", 2048, 112, "as the DGX H100"),
    NodeType("hgx-h100-96gb", "H100-96GB-SXM", 8, "8x400 Gb/s", 1536, 96, "Grand Teton (Meta, Open Compute Project)"),
    NodeType("hgx-h20", "H20-96GB-SXM", 8, "8x400 Gb/s", 2048, 112, "as the DGX H100"),
    NodeType("dgx-h200", "H200-141GB-SXM", 8, "8x400 Gb/s", 2048, 112, _DGX),
    NodeType("dgx-b200", "B200-180GB-SXM", 8, "8x400 Gb/s", 2048, 112, _DGX),
    NodeType("dgx-b300", "B300-270GB-SXM", 8, "8x800 Gb/s", 2048, 128, _DGX),
    NodeType("gb200-nvl72", "GB200-186GB", 72, "72x400 Gb/s", 17408, 2592, "NVIDIA GB200 NVL72 page"),
    NodeType("gb300-nvl72", "GB300-279GB", 72, "72x800 Gb/s", 17408, 2592, "NVIDIA GB300 NVL72 page"),
    NodeType("frontier", "MI250X-64GB-GCD", 8, "4x200 Gb/s", 512, 64, "OLCF Frontier user guide"),
    NodeType("azure-nd-mi300x-v5", "MI300X-192GB", 8, "8x400 Gb/s", 1850, 96, _AZURE),
    NodeType("mi325x-server", "MI325X-256GB", 8, "8x400 Gb/s", 3072, 128, "as the MI300X"),
    NodeType("mi350x-server", "MI350X-288GB", 8, "8x400 Gb/s", 3072, 128, _MI350),
    NodeType("mi355x-server", "MI355X-288GB", 8, "8x400 Gb/s", 3072, 128, _MI350),
    NodeType("mi300a-node", "MI300A-128GB", 4, "4x200 Gb/s", 512, 96, "El Capitan: four, a port each"),
    NodeType("mi250-node", "MI250-64GB-GCD", 8, "4x200 Gb/s", 512, 64, "as Frontier's"),
    NodeType("aws-p3dn", "V100-32GB-SXM2", 8, "100 Gb/s EFA", 768, 96, _AWS),
    NodeType("aws-p4d", "A100-40GB-SXM", 8, "4x100 Gb/s EFA", 1152, 96, _AWS),
    NodeType("aws-p4de", "A100-80GB-SXM", 8, "4x100 Gb/s EFA", 1152, 96, _AWS),
    NodeType("aws-p5", "H100-80GB-SXM", 8, "32x100 Gb/s EFA", 2048, 192, _AWS),
    NodeType("aws-p5en", "H200-141GB-SXM", 8, "16x200 Gb/s EFA", 2048, 192, _AWS),
    NodeType("aws-p6-b200", "B200-180GB-SXM", 8, "8x400 Gb/s EFA", 2048, 192, _AWS),
    NodeType("aws-g5", "A10G-24GB", 8, "100 Gb/s", 768, 192, _AWS),
    NodeType("aws-g6", "L4-24GB", 8, "100 Gb/s", 768, 192, _AWS),
    NodeType("aws-g6e", "L40S-48GB", 8, "400 Gb/s", 1536, 192, _AWS),
    NodeType("aws-g4dn", "T4-16GB", 8, "100 Gb/s", 384, 96, _AWS),
    NodeType("gcp-a2-high", "A100-40GB-SXM", 8, "100 Gb/s", 680, 96, _GCP),
    NodeType("gcp-a2-ultra", "A100-80GB-SXM", 8, "100 Gb/s", 1360, 96, _GCP),
    NodeType("gcp-a3-high", "H100-80GB-SXM", 8, "4x200 Gb/s", 1872, 208, _GCP),
    NodeType("gcp-a3-mega", "H100-80GB-SXM", 8, "8x200 Gb/s", 1872, 208, _GCP),
    NodeType("gcp-a3-ultra", "H200-141GB-SXM", 8, "8x400 Gb/s", 2952, 224, _GCP),
    NodeType("azure-ndv4", "A100-40GB-SXM", 8, "8x200 Gb/s", 900, 96, _AZURE),
    NodeType("azure-ndm-a100-v4", "A100-80GB-SXM", 8, "8x200 Gb/s", 1900, 96, _AZURE),
    NodeType("azure-nd-h100-v5", "H100-80GB-SXM", 8, "8x400 Gb/s", 1900, 96, _AZURE),
    NodeType("azure-nd-h200-v5", "H200-141GB-SXM", 8, "8x400 Gb/s", 1850, 96, _AZURE),
    NodeType("oci-a100-80gb", "A100-80GB-SXM", 8, "16x100 Gb/s", 2048, 128, "Oracle Cloud BM.GPU.A100-v2.8 page"),
    NodeType("oci-h100", "H100-80GB-SXM", 8, "8x400 Gb/s", 2048, 112, "Oracle Cloud BM.GPU.H100.8 page"),
)
# fmt: on


def node_type(name: str) -> NodeType | None:
    """Returns the type of node of a name; None if there is none."""
    return next((node for node in NODE_TYPES if node.name == name), None)


def reference_node(device: DeviceKind) -> NodeType:
    """Returns the node assumed for a device: its maker's, or else a server of eight cards and one 100 Gb/s port."""
    for node in NODE_TYPES:
        if node.device in (device.name, device.like):
            return node
    return NodeType(device.name.lower(), device.name, 8, "100 Gb/s", 512, 64, "a common server of PCIe cards, assumed")
