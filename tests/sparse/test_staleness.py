"""Trainers that are ahead of their servers' steps, up to a bound."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from served_tables import (
    SECRET,
    STEPS,
    WORDS,
    serving,
    step,
    trained,
    words,
)

from stoker.launch.process_pool import Pool
from stoker.sparse import Feature, JaggedIds, SparseEmbeddings
from stoker.sparse.servers import RowServers
from stoker.sparse.servers.server_connection import Message, ServerConnection
from stoker.sparse.servers.server_link import ServerLink
from stoker.sparse.servers.wire_format import dict_of


def push(link: ServerConnection, step: int) -> None:
    """Pushes a trainer's part of a step: a gradient of 1 for the row of id 7."""
    arrays = [np.array([7]), np.array([0]), np.array([1]), np.ones((1, 3))]
    link.send({"kind": "push", "layout": 0, "step": step}, arrays)
    link.send({"kind": "commit", "layout": 0, "step": step, "scale": 1.0, "lr_factor": 1.0})


@pytest.mark.parametrize(("least", "waits"), [(1, True), (0, False)])
def test_a_lookup_waits_for_the_steps_that_it_must_have(least: int, waits: bool, tmp_path: Path) -> None:
    """A trainer that is ahead waits for the other's steps, except for as many as the bound allows."""
    run = {"name": "r", "seed": 0, "servers": 1, "trainers": 2, "number": 0, "layouts": [[dict_of(WORDS)]]}
    with serving(tmp_path / "a") as (servers, [server]):
        links = [ServerConnection.dial(servers.addresses[0], SECRET) for _ in range(2)]
        for trainer, link in enumerate(links):
            link.send({"run": run, "trainer": trainer})
            link.receive()
        push(links[0], 0)
        answers: list[np.ndarray] = []
        thread = threading.Thread(target=lambda: answers.extend(links[0].receive()[1]))
        message = {"kind": "values", "layout": 0, "least": least, "training": True}
        links[0].send(message, [np.array([7]), np.array([0])])
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() == waits
        push(links[1], 0)
        thread.join(20)
        push(links[0], 0)  # repeated, as after a lost connection
        links[0].send({**message, "least": 1}, [np.array([7]), np.array([0])])
        [after], [before] = links[0].receive()[1], answers
        assert np.allclose(before - after, 0 if waits else 0.2)
        assert not server._shards[0]._steps
        for link in links:
            link.close()


def run_ahead(servers: RowServers) -> int:
    """Has the first trainer take as many steps as the bound allows before the second one takes any."""
    tables = SparseEmbeddings([WORDS], {"words": Feature("words")}, group=dist.group.WORLD, servers=servers)
    if dist.get_rank() == 1:
        dist.barrier()
    for _ in range(servers.staleness + 1):
        tables({"words": JaggedIds.single(torch.tensor([7]))})["words"].sum().backward()
        tables.apply_gradients()
    if dist.get_rank() == 0:
        dist.barrier()
    return int(tables.state().step)


def test_a_trainer_may_be_ahead_as_far_as_the_bound_says(pool: Pool, tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, _):
        assert pool.run(run_ahead, replace(servers, staleness=3), world=2, timeout=30) == [4, 4]


def test_a_stale_run_learns_as_well(tmp_path: Path) -> None:
    """One trainer never waits for itself: with any bound its lookups include all of its own steps."""
    losses, _ = trained(None, range(STEPS), [])
    with serving(tmp_path / "a") as (servers, _):
        stale, _ = trained(replace(servers, staleness=2), range(STEPS), [])
    assert stale == pytest.approx(losses, rel=1e-12)


def test_an_evaluation_includes_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least, ask = list[int](), ServerLink.ask

    def counted(link: ServerLink, message: Message, *arrays: object) -> None:
        least.append(message["least"])
        ask(link, message, *arrays)  # type: ignore[arg-type]

    with serving(tmp_path / "a") as (servers, _):
        tables = words(replace(servers, staleness=2))
        monkeypatch.setattr(ServerLink, "ask", counted)
        for _ in range(4):
            step(tables)
        tables.eval()({"words": JaggedIds.single(torch.arange(5))})
    assert least == [0, 0, 0, 1, 4]
