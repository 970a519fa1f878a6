"""What a job asks of Ray: a bundle for each node, and why Ray cannot place them, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Placement:
    """The nodes of a job.

    Attributes:
        nodes: how many, each a bundle of its own node (STRICT_SPREAD).
        cpus, gpus: of each.
        resources: further ones of each, by name.
    """

    nodes: int
    cpus: float
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """What one node must have free."""
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        return {"CPU": self.cpus, **gpus, **self.resources}

    def fits(self, node: Mapping[str, Any]) -> bool:
        """Whether a node could ever hold a bundle: of what it has in all."""
        return all(float(node.get(name, 0.0)) >= wanted for name, wanted in self.bundle().items())

    def refusal(self, nodes: Sequence[Mapping[str, Any]]) -> str:
        """Why the cluster can never place all bundles; empty where it can.

        Args:
            nodes: the resources of each node that is alive.
        """
        fitting = sum(self.fits(node) for node in nodes)
        if fitting >= self.nodes:
            return ""
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle().items())
        return f"{self.nodes} nodes with {wanted} are wanted, and of Ray's {len(nodes)} nodes {fitting} have that"
