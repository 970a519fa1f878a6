"""Rows of ``task: ranking`` in a file and on servers against those in memory."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click_logs import CONSTANT, ranking_job
from running import assert_same_state, at_sample, run, write_job
from steps_in_layout import steps_in_layout

from stoker.checkpoint.rows_by_id import rows_by_id
from stoker.cli.main import main
from stoker.console import Console
from stoker.errors import UserError
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_secret import read_secret
from stoker.sparse.read_waits import ReadWaits
from stoker.sparse.servers.row_server import RowServer
from stoker.sparse.tiered_rows import TieredRows
from stoker.train.display import Display
from stoker.train.prepare import prepare
from stoker.train.run import train_run


def test_rows_in_a_file_are_those_in_memory(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(ReadWaits, "often", True)  # as if the page cache did not have the file
    monkeypatch.setattr(TieredRows, "prefetch", lambda self, rows: asked.append(len(rows)))
    table, train = {"optimizer": "adam", "lr": 0.01}, {**CONSTANT, "micro_batch": 4}
    memory = run(clicks, ranking_job(ranking={"table": table}, output="memory", train=train))
    assert not asked
    without = run(clicks, ranking_job(ranking={"table": {**table, "memory_rows": 16}}, output="without", train=train))
    assert len(asked) == 5 and min(asked[1:]) > 10  # the first step finds no rows, the last has no next batch
    monkeypatch.undo()
    monkeypatch.chdir(clicks)
    disk = run(clicks, ranking_job(ranking={"table": {**table, "memory_rows": 16}}, train=train))
    for other in (without, disk):
        assert other.losses == memory.losses
        assert_same_state(other.last_state(), memory.last_state())


def test_processes_bring_each_others_rows_from_their_files(clicks: Path, pool: Pool) -> None:
    table = {"memory_rows": 16, "eviction": {"max_rows": 20, "every": 2}}
    found = []
    for world in (1, 2):
        write_job(clicks, ranking_job(output=f"of {world}", ranking={"table": table}, train={**CONSTANT, "batch": 14}))
        found.append(pool.run(steps_in_layout, str(clicks), 6, (f"parallel.data={world}",), world=world)[0])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.slow
def test_rows_on_servers_are_those_of_the_trainer(clicks: Path) -> None:
    features = [{"name": "item_id", "width": 6}]
    here = run(clicks, ranking_job(output="here", ranking={"features": features}, train=CONSTANT))
    secret = clicks / "secret"
    secret.write_bytes(bytes(range(32, 96)))
    secret.chmod(0o600)
    server = RowServer(("127.0.0.1", 0), read_secret(secret), clicks / "rows", snapshot_every=3)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        address = "{}:{}".format(*server.address)
        block: dict[str, Any] = {"servers": {"addresses": [address], "secret": "secret", "patience": 20.0}}
        block |= {"table": {"memory_rows": 16}, "features": features}  # rows in the server's memory
        run(clicks, ranking_job(ranking=block, steps=3, train=CONSTANT))
        served = run(clicks, ranking_job(ranking=block, train=CONSTANT))  # a new run for the server
        assert served.loop.resumed_from == "disk"
    finally:
        server.close()
    assert served.losses == pytest.approx(here.losses, rel=1e-12)
    assert main(["eval", "run"]) == 0  # without the server


def test_the_display_shows_a_lost_server(clicks: Path) -> None:
    secret = clicks / "secret"
    secret.write_bytes(bytes(range(32, 96)))
    secret.chmod(0o600)

    def serve(address: tuple[str, int]) -> RowServer:
        server = RowServer(address, read_secret(secret), clicks / "rows")
        threading.Thread(target=server.serve, daemon=True).start()
        return server

    running = [serve(("127.0.0.1", 0))]
    address = "{}:{}".format(*running[0].address)

    def restart() -> None:
        running[0].close()
        threading.Timer(0.3, lambda: running.append(serve(running[0].address))).start()

    servers = {"addresses": [address], "secret": "secret", "patience": 20.0}
    prepared = prepare(load_job(write_job(clicks, ranking_job(ranking={"servers": servers}, steps=3))), clicks)
    at_sample(12, restart)(prepared)
    folder, shown = RunFolder(clicks / "run"), io.StringIO()
    with folder.take():
        train_run(prepared, folder, clicks, display=Display("row", console=Console(file=shown, width=200)))
    running[1].close()
    assert shown.getvalue().count(f"the server of rows at {address} was lost: ") == 1
    assert "the run waits for it, at most 20 s\n" in shown.getvalue()


@pytest.mark.parametrize(
    ("address", "message"),
    [("a", "a: this is not a HOST:PORT"), ("a:99999", "a:99999: 99999 is not a port; a port is from 1 to 65535")],
)
def test_addresses_of_servers_are_checked_when_a_job_is_read(address: str, message: str, tmp_path: Path) -> None:
    servers = {"addresses": ["10.0.0.7:1", "[::1]:65535", address], "secret": "s"}
    with pytest.raises(UserError) as found:
        load_job(write_job(tmp_path, ranking_job(ranking={"servers": servers})))
    (problem,) = found.value.problems
    assert (problem.message, problem.key, problem.line) == (message, "ranking.servers.addresses[2]", 3)


@pytest.mark.slow  # three runs with a checkpoint in every step
def test_increments_from_servers_are_the_rows_to_the_bit(clicks: Path) -> None:
    """Also if a server is killed between a base and its increment, and the run resumes from an increment."""
    secret = clicks / "secret"
    secret.write_bytes(bytes(range(32, 96)))
    secret.chmod(0o600)
    table = {"admission": {"count": 2}, "eviction": {"age": 2, "every": 2}}
    common = {"train": CONSTANT, "steps": 8}

    def job(output: str, **changes: Any) -> dict[str, Any]:
        checkpoint = {"every": 1, "best": False, "memory": 0, "keep": 20, **changes.pop("checkpoint", {})}
        return ranking_job(output=output, checkpoint=checkpoint, **{**common, **changes})

    whole = run(clicks, job("whole", ranking={"table": table}))
    folders = [clicks / "rows-0", clicks / "rows-1"]
    servers = [RowServer(("127.0.0.1", 0), read_secret(secret), folder, snapshot_every=3) for folder in folders]
    for server in servers:
        threading.Thread(target=server.serve, daemon=True).start()

    def return_after(number: int) -> Callable[[], None]:
        def again() -> None:
            servers[number].close()
            address = servers[number].address
            servers[number] = RowServer(address, read_secret(secret), folders[number], snapshot_every=3)
            threading.Thread(target=servers[number].serve, daemon=True).start()

        return again

    block = {
        "table": table,
        "servers": {"addresses": ["{}:{}".format(*s.address) for s in servers], "secret": "secret"},
    }
    try:
        increments = {"ranking": block, "checkpoint": {"full_every": 4}}
        first = run(clicks, job("served", **increments), "steps=3", before=at_sample(24, return_after(0)))
        assert first.store.numbers(3).get("base") == 1  # the newest one is an increment
        served = run(clicks, job("served", **increments), before=at_sample(60, return_after(1)))
        assert served.loop.resumed_from == "disk"
    finally:
        for server in servers:
            server.close()
    assert {step: served.store.numbers(step).get("base") for step in served.store.steps()} == {
        1: None, 2: 1, 3: 1, 4: None, 5: 4, 6: 4, 7: 4, 8: None,
    }  # fmt: skip
    assert served.losses == whole.losses
    for step in range(1, 9):
        rows, others = (rows_by_id(ran.store.load(step).tensors) for ran in (whole, served))
        assert rows.keys() == others.keys() and all(torch.equal(rows[name], others[name]) for name in rows)
