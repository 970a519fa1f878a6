"""The PCI address of a GPU, as NVIDIA's driver writes it."""


def pci_address(domain: int, bus: int, device: int) -> str:
    """Returns the address, such as ``0000:1b:00``."""
    return f"{domain:04x}:{bus:02x}:{device:02x}"
