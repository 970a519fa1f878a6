"""The number of islands if `parallel.sync.islands` is auto: one per node, or per copy on a single node."""

from __future__ import annotations

from math import gcd


def islands_of(copies: int, nodes: int) -> int:
    """Islands of the copies of a model on nodes with equally many processes each.

    As many as can each begin and end with a node. Where that would be one, as on one node, each copy is one: `sync`
    then does on one machine what it does on several.
    """
    shared = gcd(copies, nodes)
    return shared if shared > 1 else copies


def reason_for(copies: int, nodes: int | None) -> str:
    """Explains the number of islands.

    Args:
        nodes: None if it is not known yet.
    """
    if nodes is None or nodes == 1:
        return "each copy of the model is one" + ("; on several nodes each node" if nodes is None else " on one node")
    shared = gcd(copies, nodes)
    if shared == 1:
        return f"each copy of the model is one, as {copies} cannot be shared out over {nodes} nodes"
    return "each node is one" if shared == nodes else f"each {nodes // shared} of the {nodes} nodes are one"
