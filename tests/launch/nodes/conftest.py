"""Three nodes that train, for the tests of the leader."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_nodes import Cluster, node, ranks


@pytest.fixture
def three(tmp_path: Path) -> Cluster:
    """Three nodes that train."""
    cluster = Cluster(tmp_path)
    cluster.join(node("b"), node("c"))
    cluster.after(0.0)
    assert ranks(cluster.started()) == {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
    return cluster
