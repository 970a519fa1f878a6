"""Throughput of embedding tables: Stoker's, torch's EmbeddingBag(sparse=True) and TorchRec's, on one machine.

    python benchmarks/sparse.py [--rounds 3] [--engines stoker,torch] [--tower] [--disk SHARE]

26 features with one id per sample, rows of width 16, 10 million ids in the proportions of Criteo's tables, ids drawn
from a power law. All rows exist before the timed steps. Each engine runs in a separate process, engines alternate, and
the median of the rounds is reported.

- ``stoker``: dynamic tables of 64-bit ids; ``arrays``: the same without numba. ``prefetch``: the rows of each step are
  prefetched before the passes of the previous step, for ``--disk``; with ``--servers`` a server has rows and file.
- ``torch``: `EmbeddingBag(sparse=True)` with Adagrad. ``torchrec``: its fused tables with row-wise Adagrad. Both get
  row numbers, so neither looks up ids.
- ``torchrec-ids``: the same job as Stoker's: 64-bit ids go through TorchRec's module for ids without collisions (MCH),
  which already has all of them. Its pass that assigns rows to new ids is not in the timed steps.

TorchRec needs packages that match the release of torch: see `docs/sparse-tables.md`; ``--python`` names an interpreter
that has them. On a machine with enough memory the page cache holds the whole file: ``--cold`` drops it from the cache
before each step, except for rows prefetched in the previous step. Tables in Redis and LMDB: `sparse_store.py`.

A step consists of pooled rows, a loss, gradients, and an optimizer step. Batches are converted to each library's
format before the timed steps. Without ``--tower`` the loss is a sum, so that the tables alone are timed; with it a DLRM
of two small MLPs and dot products is trained by SGD on top, the same for all engines.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

# distinct values of the 26 fields of Criteo's Kaggle data, as DLRM's reference code reports them
CRITEO = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10]
CRITEO += [5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]
WIDTH, DENSE, LR, EPS = 16, 13, 0.05, 1e-8
NEW_IDS_EVERY = 1000  # steps between two passes of TorchRec's module for new ids: none is in the timed steps


@dataclass(frozen=True)
class Engine:
    """Embedding tables of one library.

    Attributes:
        lay_out: converts ids [features, batch] to the library's format; not timed.
        forward: returns pooled rows in the library's format: [batch, features x width] in one tensor, or [batch, width]
            for each feature.
        update: completes a step after the backward pass.
        coming: prefetches the rows of a coming batch.
        clean: called before each step.
    """

    lay_out: Callable[[np.ndarray], Any]
    forward: Callable[[Any], Sequence[Tensor]]
    update: Callable[[], None]
    coming: Callable[[Any], None] = lambda batch: None
    clean: Callable[[], None] = lambda: None


def sizes_of(rows: int) -> list[int]:
    """Returns the rows of each table: large tables are scaled so that the total is ``rows``."""
    small = sum(size for size in CRITEO if size < 10**6)
    scale = max(rows - small, 0) / (sum(CRITEO) - small)
    return [size if size < 10**6 else max(1, int(size * scale)) for size in CRITEO]


def batches_of(sizes: list[int], batch: int, count: int, exponent: float, seed: int = 0) -> list[np.ndarray]:
    """Returns batches of ids, int64 [features, batch]: ranks drawn from a bounded power law, permuted to rows."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        draws = random.random((len(sizes), batch))
        most = np.array(sizes, np.float64)[:, None] + 1
        power = 1 - exponent
        ranks = ((draws * (most**power - 1) + 1) ** (1 / power)).astype(np.int64) - 1
        found.append(np.minimum(ranks, np.array(sizes)[:, None] - 1))
    multipliers = [next(m for m in (7919, 104729, 1299709, 15485863) if np.gcd(m, size) == 1) for size in sizes]
    return [ranks * np.array(multipliers)[:, None] % np.array(sizes)[:, None] for ranks in found]


class Tower(nn.Module):
    """DLRM (Naumov et al., 2019): an MLP over dense features, dot products of all pairs, an MLP over these."""

    def __init__(self, features: int) -> None:
        super().__init__()
        pairs = (features + 1) ** 2
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.top = nn.Sequential(nn.Linear(pairs + WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, rows: Sequence[Tensor], dense: Tensor) -> Tensor:
        x = self.bottom(dense)
        all_rows = torch.cat([x, *rows], dim=1).unflatten(1, (-1, WIDTH))
        products = torch.bmm(all_rows, all_rows.transpose(1, 2)).flatten(1)  # both halves: selecting one is slower
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


def stoker_engine(
    sizes: list[int], disk: float | None, *, prefetch: bool, processes: int, server: bool, cold: bool
) -> Engine:
    from stoker.sparse import DiskTier, Feature, JaggedIds, SparseEmbeddings, TableSettings
    from stoker.sparse.servers import RowServers

    tier = DiskTier(Path(tempfile.gettempdir()), int(disk * sum(sizes))) if disk else None
    tables = [TableSettings(f"t{i}", WIDTH, lr=LR, eps=EPS, disk=tier) for i in range(len(sizes))]
    group = dist.group.WORLD if processes > 1 else None
    servers = RowServers((_server(),), bytes(32)) if server else None
    looked_up = {f"f{i}": Feature(f"t{i}") for i in range(len(sizes))}
    model = SparseEmbeddings(tables, looked_up, group=group, servers=servers)

    def lay_out(ids: np.ndarray) -> dict[str, JaggedIds]:
        ones = torch.ones(ids.shape[1], dtype=torch.int64)
        return {f"f{i}": JaggedIds(torch.from_numpy(row), ones) for i, row in enumerate(raw_ids(ids))}

    nothing = torch.empty(0, dtype=torch.int64)
    with torch.no_grad():
        for i, size in enumerate(sizes):
            for part in np.split(np.arange(size), range(2**18, size, 2**18)):
                empty = {f"f{j}": JaggedIds(nothing, nothing) for j in range(len(sizes))}
                with torch.set_grad_enabled(server):  # servers create rows for lookups of a step
                    model(empty | {f"f{i}": lay_out(part[None])["f0"]})
                model.apply_gradients()  # a discarded step would delete its rows
    assert sum(model.rows.values()) == sum(sizes) or processes > 1, "all rows exist before anything is timed"
    asked: dict[str, JaggedIds] = {}

    def coming(batch: dict[str, JaggedIds]) -> None:
        if prefetch:
            asked.update(batch)
            model.prefetch(asked)

    def clean() -> None:
        if cold:
            _forget_file(model, asked)

    if not server:
        memory = sum(shard.store.bytes + shard.index.bytes for shard in (fused.source.shard for fused in model._fused))
        print(f"{memory / 2**20:,.0f} MiB of rows, optimizer state and index in a process", file=sys.stderr)
    return Engine(lay_out, lambda batch: list(model(batch).values()), model.apply_gradients, coming, clean)


def raw_ids(ids: np.ndarray) -> np.ndarray:
    """Returns 64-bit ids, distributed as hashes of strings."""
    return mix64(ids.astype(np.uint64)).view(np.int64)


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, which is a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _server() -> tuple[str, int]:
    """Starts a server of rows in a separate process, which ends with this one; returns its address."""
    from stoker.sparse.servers.row_server import RowServer

    ours, theirs = multiprocessing.Pipe()

    def serve() -> None:
        torch.set_num_threads(1)
        server = RowServer(("127.0.0.1", 0), bytes(32), Path(tempfile.mkdtemp()), snapshot_every=10**9)
        theirs.send(server.address)
        server.serve()

    multiprocessing.get_context("fork").Process(target=serve, daemon=True).start()
    return ours.recv()


def _forget_file(model: Any, kept: dict[str, Any]) -> None:
    """Drops the rows' file from the page cache, except for the pages of prefetched rows."""
    for fused in model._fused:
        shard, log = fused.source.shard, fused.source.shard.store._log
        pages = np.empty(0, np.int64)
        if kept:
            keys = fused.features.bags(kept).keys
            places = log._places[np.minimum(shard.index.find(keys.ids, keys.tables, keys.hashes), len(log._places) - 1)]
            begins = places[places >= 0].astype(np.int64) * log._record
            pages = np.unique(np.concatenate([begins, begins + log._record - 1]) // mmap.PAGESIZE)
        log._data.base.base.obj.madvise(mmap.MADV_DONTNEED)
        os.fsync(log._file.fileno())
        ends = np.append(pages, len(log._data) * log._record // mmap.PAGESIZE + 1)
        for begin, end in zip(np.append(0, pages + 1).tolist(), ends.tolist(), strict=True):
            if end > begin:
                at, size = begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE
                os.posix_fadvise(log._file.fileno(), at, size, os.POSIX_FADV_DONTNEED)


def torch_engine(sizes: list[int]) -> Engine:
    bags = nn.ModuleList(nn.EmbeddingBag(size, WIDTH, mode="sum", sparse=True) for size in sizes)
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=LR, eps=EPS)

    def forward(ids: Tensor) -> list[Tensor]:
        return [bag(row[:, None]) for bag, row in zip(bags, ids, strict=True)]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Engine(torch.from_numpy, forward, update)


def torchrec_engine(sizes: list[int]) -> Engine:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim import RowWiseAdagrad

    world = dist.get_world_size()
    names = [f"f{i}" for i in range(len(sizes))]
    configs = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=WIDTH, num_embeddings=size, feature_names=[names[i]])
        for i, size in enumerate(sizes)
    ]
    collection = EmbeddingBagCollection(tables=configs)
    _apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": LR, "eps": EPS})
    sharder = EmbeddingBagCollectionSharder()
    by_load = sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True)  # the largest tables are assigned in turn
    fused = {f"t{i}": table_wise(rank=place % world, compute_kernel="fused") for place, i in enumerate(by_load)}
    plan = construct_module_sharding_plan(
        collection, fused, sharder, world_size=world, local_size=world, device_type="cpu"
    )
    model = DistributedModelParallel(
        collection, device=torch.device("cpu"), plan=ShardingPlan({"": plan}), sharders=[sharder]
    )

    def lay_out(ids: np.ndarray) -> KeyedJaggedTensor:
        values, lengths = torch.from_numpy(ids.reshape(-1)), torch.ones(ids.size, dtype=torch.int32)
        return KeyedJaggedTensor.from_lengths_sync(keys=names, values=values, lengths=lengths)

    # the update is part of the backward pass
    return Engine(lay_out, lambda keyed: [model(keyed).values()], lambda: None)


def managed_collision_engine(sizes: list[int]) -> Engine:
    """TorchRec's tables with its module for 64-bit ids without collisions, which already has all ids."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    room = [size + 1 for size in sizes]  # the last row of a table is for unknown ids
    tables = torchrec_engine(room)
    modules = {}
    for i, size in enumerate(sizes):
        modules[f"t{i}"] = MCHManagedCollisionModule(
            zch_size=room[i],
            device=torch.device("cpu"),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=NEW_IDS_EVERY,
        )
        modules[f"t{i}"]._mch_sorted_raw_ids[:size] = torch.from_numpy(np.sort(raw_ids(np.arange(size))))
    configs = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=WIDTH, num_embeddings=rows, feature_names=[f"f{i}"])
        for i, rows in enumerate(room)
    ]
    rows_of = ManagedCollisionCollection(modules, configs)

    def forward(raw: Any) -> Sequence[Tensor]:
        keyed = rows_of(raw)
        assert len(keyed.values()) == len(raw.values())
        return tables.forward(keyed)

    return replace(tables, lay_out=lambda ids: tables.lay_out(raw_ids(ids)), forward=forward)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Measures one engine in this process; returns its figures."""
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    store = dist.FileStore(options.store, options.processes)
    dist.init_process_group("gloo", rank=options.rank, world_size=options.processes, store=store)
    sizes = sizes_of(options.rows)
    batches = batches_of(sizes, options.batch, options.steps + options.warm, options.exponent, options.rank)
    if options.engine == "arrays":
        sys.modules["numba"] = None  # type: ignore[assignment]  # as if it were not installed
    if options.engine in ("stoker", "arrays", "prefetch"):
        own = {"processes": options.processes, "server": options.servers, "cold": options.cold}
        engine = stoker_engine(sizes, options.disk, prefetch=options.engine == "prefetch", **own)
    else:
        engine = {"torch": torch_engine, "torchrec": torchrec_engine, "torchrec-ids": managed_collision_engine}[
            options.engine
        ](sizes)
    tower: nn.Module = Tower(len(sizes))
    if options.processes > 1:
        tower = nn.parallel.DistributedDataParallel(tower)
    sgd = torch.optim.SGD(tower.parameters(), lr=0.01)
    dense = torch.rand(options.batch, DENSE)
    labels = (torch.rand(options.batch) < 0.25).float()
    times, cpu = [], []
    laid_out = [engine.lay_out(ids) for ids in batches]
    for batch, following in zip(laid_out, [*laid_out[1:], laid_out[0]], strict=True):
        busy = time.process_time()
        began = time.perf_counter()
        engine.clean()  # timed, as threads read in the meantime
        engine.coming(following)  # before the passes, as in the training loop
        rows = engine.forward(batch)
        if options.tower:
            loss = nn.functional.binary_cross_entropy_with_logits(tower(rows, dense), labels)
            loss.backward()
            sgd.step()
            sgd.zero_grad()
        else:
            torch.autograd.backward(rows, [torch.full_like(each, 1 / options.batch) for each in rows])
        engine.update()
        times.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
    timed, busy = times[options.warm :], sum(cpu[options.warm :])
    done = options.batch * len(timed) * options.processes
    busy *= options.processes
    return {"samples_s": done / sum(timed), "samples_cpu_s": done / busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--engines", default="stoker,torch", help="of stoker, arrays, prefetch, torch, torchrec, torchrec-ids"
    )
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=1, help="each with its own samples; not for torch's tables")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has torchrec")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--exponent", type=float, default=1.05, help="of the power law; 0 is uniform")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tower", action="store_true")
    parser.add_argument("--disk", type=float, help="share of the rows that are in memory; the others are in a file")
    parser.add_argument("--servers", action="store_true", help="rows are on a parameter server on this machine")
    parser.add_argument("--cold", action="store_true", help="the file of --disk is not in the page cache")
    options = parser.parse_args()
    if options.cold and (options.servers or not options.disk):
        parser.error("--cold is of --disk without --servers")
    if options.engine:
        figures = measure(options)
        if options.rank == 0:
            print(json.dumps(figures))
        dist.barrier()
        return
    engines = options.engines.split(",")
    results: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    for _ in range(options.rounds):
        for engine in engines:
            python = options.python if engine.startswith("torchrec") else sys.executable
            with tempfile.TemporaryDirectory() as folder:
                command = [python, str(Path(__file__)), *sys.argv[1:], "--engine", engine, "--store", f"{folder}/store"]
                ranks = [
                    subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
                    for rank in range(options.processes)
                ]
                printed = [rank.communicate()[0] for rank in ranks]
            if any(rank.returncode for rank in ranks):
                raise SystemExit(f"{engine} has failed")
            results[engine].append(json.loads(printed[0].splitlines()[-1]))
    for engine, rounds in results.items():
        speed = statistics.median(one["samples_s"] for one in rounds)
        each = ", ".join(f"{one['samples_s']:,.0f}" for one in rounds)
        busy = statistics.median(one["samples_cpu_s"] for one in rounds)
        print(f"{engine:10s} {speed:10,.0f} samples/s ({each}), {busy:10,.0f} a second of processor time")


if __name__ == "__main__":
    main()
