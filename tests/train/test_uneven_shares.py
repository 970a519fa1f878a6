"""Shares of a step's samples among data-parallel processes that cannot have equally many."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stoker.job.layout import Layout
from stoker.train.distributed import Distributed


@pytest.mark.parametrize("processes", [1, 3, 6, 8])
@pytest.mark.parametrize("last", [8, 5])
def test_every_sample_belongs_to_one_process(processes: int, last: int) -> None:
    shares = []
    for place in range(processes):
        mesh = SimpleNamespace(data_index=place, layout=Layout(data=processes))
        shares.append(Distributed.share(SimpleNamespace(_mesh=mesh), 0, last, 8))  # type: ignore[arg-type]
    assert [sample for share in shares for sample in range(*share)] == list(range(last))
