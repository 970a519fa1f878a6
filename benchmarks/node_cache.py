"""The node cache: bytes that leave the origin, and the cold start of several processes on a remote model.

    python benchmarks/node_cache.py [--rate 200]

The origin is a web server on the loopback interface, in a process of its own, that counts what it sends. Nodes are
folders for caches; with peers, each has a supervisor that the processes of the other one ask. fsspec's own caches,
with one folder a node, are the anchor. Every process starts with its imports done, so that they are not measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

from counting_origin import CountingOrigin

RANKS, NODES, EPOCHS = 4, 2, 2
FILES, FILE_BYTES = 8, 4 * 2**20
SECRET = bytes(range(32))
SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    """Prints the two rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=0.0, help="MB/s of the origin to each connection; 0: no limit")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"origin bytes, {RANKS} ranks x {NODES} nodes x {EPOCHS} epochs, of a dataset of {FILES} files")
    for name, read, with_peers in (
        ("Stoker, with peers", read_rows, True),
        ("Stoker, without", read_rows, False),
        ("fsspec filecache", read_filecache, False),
        ("fsspec simplecache", read_simplecache, False),
    ):
        times, wrong = origin_bytes(read, with_peers=with_peers)
        failed = f"; {wrong} of {RANKS * NODES} processes failed or read other bytes" if wrong else ""
        print(f"  {name:<20} {times:5.2f} times the dataset{failed}")
    print(f"cold start on a model of {arguments.gib:g} GiB, origin {arguments.rate or 'without limit'} MB/s")
    for number in range(arguments.rounds):
        one, _ = cold_start(1, arguments.gib, arguments.rate * 1e6)
        several, moved = cold_start(arguments.processes, arguments.gib, arguments.rate * 1e6)
        words = f"{arguments.processes} processes {several:.2f} s, {several / one:.3f} times, {moved:.3f} downloads"
        print(f"  round {number + 1}: one process {one:.2f} s, {words}")


# -- the origin ------------------------------------------------------------------------------------------------


def serve(objects: Callable[[], dict[str, bytes]], rate: float, pipe: Connection) -> None:
    """Serves until it is told to stop; then says what it sent."""
    with CountingOrigin(objects=objects(), rate=rate) as origin:
        pipe.send(origin.url)
        pipe.recv()
        pipe.send(origin.total)


@contextmanager
def serving(objects: Callable[[], dict[str, bytes]], rate: float = 0.0) -> Iterator[tuple[str, Callable[[], int]]]:
    """The address of an origin, and what says how many bytes it sent."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(objects, rate, theirs))
    process.start()
    told: list[int] = []

    def sent() -> int:
        if not told:
            ours.send(None)
            told.append(ours.recv())
        return told[0]

    yield ours.recv(), sent
    sent()
    process.join()


def dataset() -> dict[str, bytes]:
    """JSON lines in several files."""
    made = {}
    for number in range(FILES):
        words = random.Random(number)
        line = lambda: json.dumps({"text": words.randbytes(500).hex()}).encode() + b"\n"  # noqa: B023, E731
        made[f"part-{number:03d}.jsonl"] = b"".join(line() for _ in range(FILE_BYTES // 1013))
    return made


def model(gib: float) -> dict[str, bytes]:
    """A folder with a file of weights, by names that a model has."""
    weights = random.Random(0).randbytes(2**20) * round(gib * 2**10)
    return {"m/config.json": b'{"model_type": "llama"}', "m/model.safetensors": weights}


class Model:
    """`model` of a size, for another process."""

    def __init__(self, gib: float) -> None:
        self.gib = gib

    def __call__(self) -> dict[str, bytes]:
        return model(self.gib)


# -- row one ---------------------------------------------------------------------------------------------------


def origin_bytes(read: Callable[[str], int], *, with_peers: bool) -> tuple[float, int]:
    """(bytes that left the origin over those of the dataset, processes that read something else)."""
    size = sum(map(len, dataset().values()))
    base = Path(tempfile.mkdtemp(prefix="node-cache-"))
    nodes = [(f"n{at + 1}", f"127.0.0.{2 + at}") for at in range(NODES)]
    with serving(dataset) as (url, sent):
        over, barrier, addresses, results = SPAWN.Event(), SPAWN.Barrier(RANKS * NODES), {}, SPAWN.Queue()
        supervisors = []
        for name, host in nodes if with_peers else []:
            ours, theirs = SPAWN.Pipe()
            supervisors.append(SPAWN.Process(target=supervise, args=(base / name, host, url, theirs, over)))
            supervisors[-1].start()
            addresses[name] = ours.recv()
        ranks = [
            SPAWN.Process(target=rank, args=(read, base / name, name, host, addresses, url, barrier, results))
            for name, host in nodes
            for _ in range(RANKS)
        ]
        for process in ranks:
            process.start()
        counts = [results.get() for _ in ranks]
        over.set()
        for process in (*ranks, *supervisors):
            process.join()
        times = sent() / size
    shutil.rmtree(base)
    return times, sum(count != EPOCHS * size for count in counts)


def rank(
    read: Callable[[str], int],
    folder: Path,
    name: str,
    host: str,
    addresses: dict[str, tuple[str, int]],
    url: str,
    barrier: Barrier,
    results: Any,
) -> None:
    """One process of a node: reads the dataset for two epochs."""
    from stoker.launch.nodes.cache_exchange import NodePeers
    from stoker.node_cache import cache_peers

    os.environ["STOKER_CACHE"] = str(folder)
    if addresses:
        cache_peers.set_peers(NodePeers(name, tuple(addresses.items()), host, SECRET))
    read("")  # imports
    barrier.wait()
    try:
        count = sum(read(url) for _ in range(EPOCHS))
    except Exception:
        count = -1
    results.put(count)


def supervise(folder: Path, host: str, url: str, pipe: Connection, over: Event) -> None:
    """Answers the other node, as a supervisor does."""
    from stoker.launch.nodes.cache_exchange import CacheServer
    from stoker.launch.nodes.channel import PeerNetwork, Said

    os.environ["STOKER_CACHE"] = str(folder)
    network, server = PeerNetwork((host, 0), SECRET), CacheServer([f"{url}/"])
    pipe.send(network.address)
    while not over.is_set():
        for happening in network.poll(0.05):
            if isinstance(happening, Said) and happening.message["kind"] == "cache":
                server.receive(*network.detach(happening.peer), happening.message)


def read_rows(url: str) -> int:
    """Bytes of all rows, as tokenising reads them."""
    from stoker.data.files.rows import Raw
    from stoker.data.sources import open_source
    from stoker.job.blocks.source_block import SourceBlock

    if not url:
        return 0
    source = open_source(SourceBlock(path=f"{url}/part-{{000..{FILES - 1:03d}}}.jsonl"), Path.cwd())
    return sum(len(row.value) + 1 for row in source.rows() if isinstance(row, Raw))


def read_filecache(url: str) -> int:
    """Bytes of all files through fsspec's ``filecache``."""
    return _by_fsspec("filecache", url)


def read_simplecache(url: str) -> int:
    """Bytes of all files through fsspec's ``simplecache``."""
    return _by_fsspec("simplecache", url)


def _by_fsspec(kind: str, url: str) -> int:
    import fsspec
    import fsspec.implementations.cached
    import fsspec.implementations.http

    size = 0
    for number in range(FILES) if url else []:
        name = f"{kind}::{url}/part-{number:03d}.jsonl"
        with fsspec.open(name, **{kind: {"cache_storage": os.environ["STOKER_CACHE"]}}) as file:
            size += len(file.read())
    return size


# -- row two ---------------------------------------------------------------------------------------------------


def cold_start(processes: int, gib: float, rate: float) -> tuple[float, float]:
    """(seconds until all processes have the weights, bytes that left the origin over those of the model)."""
    base = Path(tempfile.mkdtemp(prefix="node-cache-"))
    with serving(Model(gib), rate) as (url, sent):
        barrier, ends = SPAWN.Barrier(processes + 1), SPAWN.Queue()
        ranks = [SPAWN.Process(target=open_model, args=(base, f"{url}/m", barrier, ends)) for _ in range(processes)]
        for process in ranks:
            process.start()
        barrier.wait()
        began = time.time()
        seconds = max(ends.get(timeout=600) for _ in ranks) - began
        for process in ranks:
            process.join()
        moved = sent() / (gib * 2**30)
    shutil.rmtree(base)
    return seconds, moved


def open_model(folder: Path, url: str, barrier: Barrier, ends: Any) -> None:
    """One process that needs the weights."""
    import aiohttp  # noqa: F401
    import fsspec.implementations.http  # noqa: F401

    from stoker.node_cache.remote_folder import local_path, with_weights

    os.environ["STOKER_CACHE"] = str(folder)
    barrier.wait()
    assert (with_weights(local_path(url)) / "model.safetensors").stat().st_size
    ends.put(time.time())


if __name__ == "__main__":
    main()
