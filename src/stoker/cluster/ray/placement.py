"""A job's request to Ray, one bundle per node, and the reason why Ray cannot place it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Placement:
    """The nodes of a job.

    Attributes:
        nodes: number of nodes, each with one bundle (STRICT_SPREAD).
        cpus, gpus: of each.
        resources: further ones of each, by name.
    """

    nodes: int
    cpus: float
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """Returns the resources that one node must have free."""
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        return {"CPU": self.cpus, **gpus, **self.resources}

    def fits(self, node: Mapping[str, Any]) -> bool:
        """Returns whether a node's total resources could hold a bundle."""
        return all(float(node.get(name, 0.0)) >= wanted for name, wanted in self.bundle().items())

    def refusal(self, nodes: Sequence[Mapping[str, Any]]) -> str:
        """Returns why the cluster can never place all bundles; empty if it can.

        Args:
            nodes: the resources of each node that is alive.
        """
        fitting = sum(self.fits(node) for node in nodes)
        if fitting >= self.nodes:
            return ""
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle().items())
        return f"{self.nodes} nodes with {wanted} are wanted, and of Ray's {len(nodes)} nodes {fitting} have that"
