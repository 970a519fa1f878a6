"""Tables in Redis and LMDB: rows a second out, multi-gets, and how old an online score's rows are.

    python benchmarks/sparse_store.py rows [--rows 1000000] [--stores redis,lmdb]
    python benchmarks/sparse_store.py freshness [--store redis] [--steps 1500] [--every 2]

``rows`` loads a version of random ids, 16 float32 each, and asks for 500 of them at a time. ``freshness`` trains on a
generated log with ``export.sync``, serves the store by `stoker serve` in a process of its own, and asks for scores all
the time: how long after the end of each step (`metrics.jsonl`) a score of that step or a later one came back. Redis is
Debian's package redis-server, started here on a free port.
"""

from __future__ import annotations

import argparse
import bisect
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from stoker.online_store.row_backends import FORMAT, RedisBackend, StoredTable
from stoker.online_store.row_reader import RowReader
from stoker.online_store.store_version import TableDelta
from stoker.online_store.store_writers import writer_of

WIDTH, ASKED = 16, 500


@contextmanager
def place_of(store: str, folder: str) -> Iterator[str]:
    """The URL of an empty store."""
    if store == "lmdb":
        yield f"lmdb://{folder}/store"
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        time.sleep(1)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()


def load(place: str, ids: np.ndarray, rows: np.ndarray) -> float:
    """Makes a version of the rows; seconds."""
    writer, table = writer_of(place), StoredTable(0, "t", WIDTH, "float32")
    version = writer.begin()
    begin = time.perf_counter()
    writer.put(version, TableDelta(table, ids, rows.view(np.uint8), np.empty(0, np.int64)))
    seconds = time.perf_counter() - begin
    entry = {"name": "t", "width": WIDTH, "dtype": "float32"}
    writer.seal(version, {"format": FORMAT, "tables": [entry], "run": "", "step": 0, "made": 0.0}, {})
    writer.switch(version)
    return seconds


def measure_rows(options: argparse.Namespace) -> None:
    """Loads and asks each store."""
    random = np.random.default_rng(0)
    ids = np.unique(random.integers(-(2**63), 2**63 - 1, options.rows))
    rows = random.random((len(ids), WIDTH)).astype(np.float32)
    for store in options.stores.split(","):
        with tempfile.TemporaryDirectory() as folder, place_of(store, folder) as place:
            before = RedisBackend(place).client.info("memory")["used_memory"] if store == "redis" else 0
            speeds = [len(ids) / load(place, ids, rows) for _ in range(3)]
            memory = ""
            if store == "redis":
                used = RedisBackend(place).client.info("memory")["used_memory"] - before
                memory = f", {used / 3 / len(ids):.0f} bytes a row in memory"
            reader, took = RowReader(place), []
            for _ in range(500):
                asked = random.choice(ids, ASKED)
                begin = time.perf_counter()
                found = reader.rows({"t": asked})["t"]
                took.append(1000 * (time.perf_counter() - begin))
                assert np.array_equal(found, rows[np.searchsorted(ids, asked)])
            each = ", ".join(f"{speed:,.0f}" for speed in speeds)
            print(f"{store:6} {statistics.median(speeds):,.0f} rows/s out ({each}){memory}")
            print(f"{'':6} multi-get of {ASKED}: median {np.median(took):.2f} ms, p99 {np.quantile(took, 0.99):.2f} ms")


def write_log(path: Path, rows: int) -> None:
    """A generated log: 20,000 users, 5,000 items."""
    random = np.random.default_rng(0)
    user, item = random.zipf(1.2, rows) % 20_000, random.zipf(1.2, rows) % 5_000
    clicked = random.random(rows) < 0.2 + 0.5 * ((user * 31 + item) % 7 < 2)
    lines = zip(clicked.astype(int).tolist(), user.tolist(), item.tolist(), random.random(rows).tolist(), strict=True)
    with path.open("w") as file:
        file.write("clicked,user_id,item_id,price\n")
        file.writelines(f"{c},{u},{i},{p:.3f}\n" for c, u, i, p in lines)


def measure_freshness(options: argparse.Namespace) -> None:
    """Trains, serves and asks."""
    stoker = [sys.executable, "-m", "stoker"]
    with tempfile.TemporaryDirectory() as name, place_of(options.store, name) as place:
        folder = Path(name)
        write_log(folder / "clicks.csv", 200_000)
        job = {
            "task": "ranking",
            "data": "clicks.csv",
            "ranking": {"label": "clicked", "model": "deepfm"},
            "steps": options.steps,
            "output": "run",
            "train": {"batch": 1024, "precision": "fp32"},
            "evaluate": {"every": 200, "rows": 20_000},
            "export": {"sync": {"to": place, "every_seconds": options.every}},
        }
        (folder / "job.yaml").write_text(json.dumps(job))
        training = subprocess.Popen([*stoker, "train", "job.yaml"], cwd=folder, stdout=subprocess.DEVNULL)
        while not (folder / "run" / "export_sync.jsonl").exists():
            time.sleep(0.1)
            assert training.poll() is None, "training has ended"
        words = [*stoker, "serve", f"m={place}", "--port", "0", "--cache-seconds", str(options.cache)]
        server = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        url = next(line.split()[2] for line in server.stdout if line.startswith("listening on"))
        seen: list[tuple[int, float]] = []  # step of a score, and when it came
        ended = threading.Event()
        threading.Thread(target=lambda: (training.wait(), time.sleep(2), ended.set()), daemon=True).start()
        while not ended.is_set():
            body = json.dumps({"model": "m", "rows": [{"user_id": 1, "item_id": 1, "price": 0.5}] * 50}).encode()
            request = urllib.request.Request(f"{url}/v1/score", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as reply:
                step = json.loads(reply.read())["step"]
            seen.append((step, time.time()))
            time.sleep(0.05)
        server.terminate()
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        updates = [json.loads(line) for line in (folder / "run" / "export_sync.jsonl").read_text().splitlines()]
        first = seen[0][0]
        ages = []
        for step in steps:
            at = bisect.bisect_left([s for s, _ in seen], step["step"])
            if step["step"] > first and at < len(seen):
                ages.append(seen[at][1] - step["time"])
        stale, rows = [u["stale"] for u in updates[1:]], [u["rows"] for u in updates[1:]]
        print(f"{len(ages):,} steps in {steps[-1]['time'] - steps[0]['time']:.0f} s, {len(seen):,} requests of 50 rows")
        print(f"from the end of a step to its score: median {np.median(ages):.2f} s, largest {max(ages):.2f} s")
        print(f"{len(stale)} updates of {np.mean(rows):,.0f} rows: stale on arrival {max(stale):.2f} s at most")
        print(f"rows are at most {options.cache:g} s older in the server's cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["rows", "freshness"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--stores", default="redis,lmdb")
    parser.add_argument("--store", default="redis", choices=["redis", "lmdb"])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=float, default=2.0, help="seconds of export.sync")
    parser.add_argument("--cache", type=float, default=1.0, help="seconds that the server keeps rows")
    options = parser.parse_args()
    {"rows": measure_rows, "freshness": measure_freshness}[options.what](options)


if __name__ == "__main__":
    main()
