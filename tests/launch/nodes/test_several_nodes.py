"""Runs of several supervisors, on loopback addresses of this machine, through what befalls nodes and links."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from several_nodes import Nodes, assert_alike, command, free_port, prepare

from stoker.resilience.fault_injection import Fault, write_faults
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import set_node_name, shared_folder

pytestmark = [
    pytest.mark.pool,
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_processes"),
]  # real processes, for seconds

Make = Callable[..., Nodes]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Nodes] = []

    def begin(count: int, **values: object) -> Nodes:
        made.append(Nodes(tmp_path, count, **values))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for nodes in made:
        nodes.end()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RunFolder]:
    """The run of the same job on one machine that nothing happened to, by number of processes."""
    runs: dict[int, RunFolder] = {}

    def of(world: int) -> RunFolder:
        if world not in runs:
            base = tmp_path_factory.mktemp(f"whole-{world}")
            prepare(base, world)
            done = command(base, ["train", "job.yaml"], base / "log")
            assert done.wait(200) == 0, (base / "log").read_text()
            runs[world] = RunFolder(base / "run")
        return runs[world]

    return of


def test_two_nodes_train_as_one(make: Make, whole: Callable[[int], RunFolder]) -> None:
    nodes = make(2)
    nodes.start_all(2)
    nodes.finish()
    assert_alike(nodes.run, whole(4))
    assert_alike(nodes.run, whole(1), tolerance=1e-10)
    assert f"node n2 listens on 127.0.0.3:{nodes.port}" in nodes.log("n2").read_text()
    assert "node n2: rank 2 to 3 of 4" in nodes.log("n2").read_text()
    assert "done: run" in nodes.log("n1").read_text()
    copies = nodes.events("neighbour_copies")
    assert {(event["node"], event["to"]) for event in copies} == {("n1", "n2"), ("n2", "n1")}
    assert not list((nodes.base / "run").glob(".group-*"))


def test_a_killed_process_of_another_node_is_started_again(make: Make, whole: Callable[[int], RunFolder]) -> None:
    nodes = make(2)
    nodes.start_all(2)
    nodes.reach(10)
    nodes.workers("n2")[0].send_signal(signal.SIGKILL)
    nodes.finish()
    assert_alike(nodes.run, whole(4))
    (fault,), (resumed,) = nodes.events("fault"), nodes.events("resumed")
    assert fault["node"] == "n2" and fault["cause"] == "exit" and resumed["where"] == "memory"
    assert len(nodes.events("restarted")) == 1


@pytest.mark.parametrize("lost", ["n3", "n1"])
@pytest.mark.often("n1")
def test_a_killed_node_costs_no_checkpoint_and_returns(
    make: Make, whole: Callable[[int], RunFolder], lost: str
) -> None:
    """Also the first one, whose place the next takes; the copies of its ranks are on its neighbour."""
    nodes = make(3, devices=1)
    nodes.start_all(3)
    nodes.reach(10)
    shared = nodes.events("group")[0]
    nodes.kill(lost)
    nodes.processes[lost].wait()
    nodes.start(int(lost[1]))
    nodes.finish()
    assert_alike(nodes.run, whole(3))
    assert [event["node"] for event in nodes.events("node_lost")] == [lost], shared
    (resumed,) = nodes.events("resumed")
    assert resumed["where"] == "memory" and resumed["repeated"] <= 3
    assert nodes.events("group")[1]["generation"] == 2
    assert all(set(event["links_mb_s"]) == {"n1", "n2", "n3"} for event in nodes.events("checked"))


def test_fewer_nodes_go_on_and_grow_again(make: Make, whole: Callable[[int], RunFolder]) -> None:
    nodes = make(3, devices=1, nodes="2:3", pause=0.06)
    nodes.start_all(3)
    nodes.reach(8)
    nodes.kill("n2")
    nodes.wait_for(lambda: len(nodes.events("group")) == 2)
    nodes.start(2)
    nodes.finish()
    assert_alike(nodes.run, whole(3), tolerance=1e-10)
    assert [sorted(event["nodes"]) for event in nodes.events("group")] == [
        ["n1", "n2", "n3"],
        ["n1", "n3"],
        ["n1", "n2", "n3"],
    ]
    first, second = nodes.events("resumed")
    (paused,) = nodes.events("regrouped")
    assert (first["where"], second["where"]) == ("memory", "memory")
    assert second["step"] == paused["step"] and second["repeated"] == 0


def test_a_spare_takes_the_place_of_a_lost_node(make: Make, whole: Callable[[int], RunFolder]) -> None:
    nodes = make(2, devices=1, pause=0.02)
    nodes.start(3, "--spare")
    nodes.start_all(2)
    nodes.reach(8)
    nodes.kill("n2")
    nodes.finish("n1", "n3")
    assert_alike(nodes.run, whole(2))
    assert nodes.events("group")[-1]["nodes"] == {"n1": [0, 0], "n3": [1, 1]}
    assert [event["where"] for event in nodes.events("resumed")] == ["memory"]


@pytest.mark.parametrize("cut", ["n3", "n1"])
@pytest.mark.often("n1")
def test_a_cut_link_leaves_the_larger_side_at_work_and_heals(
    make: Make, whole: Callable[[int], RunFolder], cut: str
) -> None:
    nodes = make(3, devices=1, nodes="2:3", pause=0.05)
    nodes.run.path.mkdir()
    write_faults(nodes.run, [Fault("cut-link", 8, node=cut, seconds=6.0)])
    nodes.start_all(3)
    nodes.finish()
    assert_alike(nodes.run, whole(3), tolerance=1e-10)
    groups = [sorted(event["nodes"]) for event in nodes.events("group")]
    assert groups[1] == sorted({"n1", "n2", "n3"} - {cut}) and groups[-1] == ["n1", "n2", "n3"]


def test_a_process_that_hangs_on_another_node_is_named(make: Make, whole: Callable[[int], RunFolder]) -> None:
    nodes = make(2)
    nodes.run.path.mkdir()
    write_faults(nodes.run, [Fault("hang", 10, rank=3)])
    nodes.start_all(2)
    nodes.finish()
    assert_alike(nodes.run, whole(4))
    (hung,) = nodes.events("hung")
    assert (hung["rank"], hung["node"]) == (3, "n2") and "stack-3.txt" in hung["files"]


def test_a_signal_to_one_node_ends_all_with_a_checkpoint(make: Make) -> None:
    nodes = make(2, pause=0.05)
    nodes.start_all(2)
    nodes.reach(3)
    nodes.processes["n2"].send_signal(signal.SIGTERM)
    nodes.finish(code=143)
    assert nodes.run.read_events()[-1]["event"] == "stopped"
    nodes.start_all(2)
    nodes.reach(nodes.events("stopped")[0]["step"] + 2)
    assert nodes.events("resumed")[0]["where"] == "disk"


def test_another_secret_and_hostile_bytes_do_not_disturb(make: Make, whole: Callable[[int], RunFolder]) -> None:
    nodes = make(2)
    other = nodes.base / "other"
    other.write_text(secrets.token_hex(32))
    other.chmod(0o600)
    nodes.start_all(2)
    nodes.start(3, secret=other)
    nodes.reach(5)
    begin = time.process_time()
    for host in ("127.0.0.2", "127.0.0.3"):
        for size in (0, 1, 64, 5000):
            with socket.create_connection((host, nodes.port)) as stranger:
                stranger.sendall(os.urandom(size))
    assert time.process_time() - begin < 1.0
    nodes.finish("n3", code=2)
    assert "has another secret" in nodes.log("n3").read_text()
    nodes.finish("n1", "n2")
    assert_alike(nodes.run, whole(4))


def test_everything_listens_on_the_node_s_own_address(make: Make) -> None:
    nodes = make(2, pause=0.05)
    nodes.start_all(2)
    nodes.reach(3)
    for number, name in ((2, "n1"), (3, "n2")):
        own = psutil.Process(nodes.processes[name].pid)
        found = {
            connection.laddr[0]
            for process in (own, *own.children(recursive=True))
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        # Gloo takes the first address of the interface.
        assert f"127.0.0.{number}" in found and found <= {f"127.0.0.{number}", "127.0.0.1"}


def test_shared_memory_of_a_node_is_gone_afterwards(make: Make) -> None:
    def folders() -> list[Path]:
        """Those of the two nodes; other tests have theirs beside them."""
        found = []
        for name in ("n1", "n2"):
            set_node_name(name)
            found.append(shared_folder(nodes.run.path))
        set_node_name("")
        return found

    nodes = make(2)
    nodes.start_all(2)
    nodes.wait_for(lambda: all(folder.is_dir() for folder in folders()))
    nodes.finish()
    assert not any(folder.exists() for folder in folders())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "3:2"], "--nodes 3:2: not of the form MIN or MIN:MAX"),
        (["--rendezvous", "127.0.0.2"], "this is not a HOST:PORT; write it as"),
        (["--rendezvous", "127.0.0.2:0"], "--rendezvous 127.0.0.2:0: 0 is not a port; a port is from 1 to 65535"),
        (["--rendezvous", "127.0.0.2:99999"], "99999 is not a port; a port is from 1 to 65535"),
        (["--listen", "127.0.0.2:x"], "--listen 127.0.0.2:x: x is not a port"),
        (["--secret", "none"], "--secret none cannot be read"),
        (["--secret", "."], "--secret . is a folder, not a file"),
        (["--listen", "10.255.255.1"], "this machine has no such address"),
        (["faults.nodes={min: 3, max: 2}"], "`min` is 3, and `max` is 2"),
    ],
)
def test_wrong_input_is_one_clear_error(make: Make, words: list[str], said: str) -> None:
    nodes = make(2)
    process = nodes.start(1, *words)
    assert process.wait(60) in (2, 3)
    text = nodes.log("n1").read_text()
    assert said in text and "Traceback" not in text


def test_a_node_prints_the_outcome_alone_as_json(tmp_path: Path) -> None:
    base = tmp_path
    prepare(base, 2)
    (base / "secret").write_text("ab" * 32)
    (base / "secret").chmod(0o600)
    words = ["node", "job.yaml", "steps=3", "--rendezvous", f"127.0.0.2:{free_port()}", "--nodes", "1"]
    words = [sys.executable, "-m", "stoker", *words, "--secret", "secret", "--json"]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(base), os.environ.get("PYTHONPATH", "")]), "PAUSE": "0"}
    done = subprocess.run(words, cwd=base, env=own, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["state"], answer["step"], Path(answer["run"]).name) == ("done", 3, "run")
