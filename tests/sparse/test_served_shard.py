"""The steps that trainers make on the rows of one server: their order, their completeness, and their log."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stoker.sparse.servers.served_shard import Commit, ServedShard
from stoker.sparse.table_settings import TableSettings

TABLE = TableSettings("t", 1, optimizer="sgd", lr=0.5, init_scale=0.0)


def opened(folder: Path, trainers: int) -> ServedShard:
    return ServedShard([TABLE], folder, seed=0, number=0, servers=1, trainers=trainers, snapshot_every=1000)


def gradient(value: float) -> list[np.ndarray]:
    """The push of one id."""
    return [np.array([7]), np.array([0]), np.array([1]), np.array([[value]], np.float32)]


def values(shard: ServedShard, least: int) -> Tensor:
    return shard.values(np.array([7]), np.array([0]), least=least, training=False)


def test_gradients_are_summed_in_the_order_of_the_trainers(tmp_path: Path) -> None:
    """The sum of these three depends on their order."""
    found = []
    for order in permutations(range(3)):
        shard = opened(tmp_path / "".join(map(str, order)), 3)
        for trainer in order:
            shard.push(trainer, 0, gradient((1e8, -1e8, 1e-3)[trainer]))
        for trainer in order:
            shard.commit(trainer, 0, Commit(1.0, 1.0))
        found.append(values(shard, 1).item())
        shard.close(forget=False)
    assert len(set(found)) == 1 and found[0] != 0


def test_a_step_is_made_once_every_trainer_has_pushed_and_committed_it(tmp_path: Path) -> None:
    shard = opened(tmp_path, 2)
    for trainer in range(2):
        shard.commit(trainer, 0, Commit(1.0, 1.0))
    shard.push(0, 0, gradient(1.0))
    assert shard.decided() == 0
    shard.push(1, 0, gradient(2.0))
    assert shard.decided() == 1 and values(shard, 1).item() == -1.5
    shard.push(0, 0, gradient(1.0))  # a repetition
    shard.commit(0, 0, Commit(1.0, 1.0))
    assert shard.decided() == 1 and not shard._steps
    shard.close(forget=False)


def test_steps_of_the_log_have_their_scales_and_rates(tmp_path: Path) -> None:
    shard = opened(tmp_path, 1)
    for step, (scale, lr_factor) in enumerate([(1.0, 1.0), (0.25, 1.0), (1.0, 0.125), (None, 1.0)]):
        shard.push(0, step, gradient(1.0))
        shard.commit(0, step, Commit(scale, lr_factor))
    before = values(shard, 4)
    assert before.item() == -0.5 * (1 + 0.25 + 0.125)
    shard.close(forget=False)
    again = opened(tmp_path, 1)
    assert torch.equal(values(again, 4), before)
    again.close(forget=False)
