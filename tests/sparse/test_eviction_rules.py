"""Tables with rules of their own: processes that were started apart agree on the order in which they ask each other.

Hashes differ between such processes, and with them the order of a set; forked ones would not show it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMITS = {"a": 45, "b": 40, "c": 36, "d": 33, "e": 30}  # more than the ids of a step, which stay
TRAINED = """
import json, sys
import torch
import torch.distributed as dist
from stoker.sparse import Eviction, Feature, JaggedIds, SparseEmbeddings, TableSettings

meeting, rank, world, limits = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
tables = [
    TableSettings(name, 4, optimizer="sgd", eviction=Eviction(every=2, max_rows=rows)) for name, rows in limits.items()
]
features = {name: Feature(name) for name in limits}
embeddings = SparseEmbeddings(tables, features, seed=0, group=dist.group.WORLD)
for step in range(4):
    ids = torch.arange(20) + 20 * step + 7 * rank
    pooled = embeddings({name: JaggedIds(ids, torch.ones(20, dtype=torch.int64)) for name in limits})
    sum(rows.sum() for rows in pooled.values()).backward()
    embeddings.apply_gradients()
print(json.dumps(embeddings.rows))
dist.destroy_process_group()
"""


@pytest.mark.slow  # processes import torch
def test_every_rule_keeps_its_rows_on_two_processes(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINED, str(tmp_path / "meet"), str(rank), "2", json.dumps(LIMITS)],
            env={**os.environ, "PYTHONHASHSEED": str(7 * rank + 1)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    rows = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert {name: rows[0][name] + rows[1][name] for name in LIMITS} == LIMITS
